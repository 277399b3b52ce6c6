#include "tiny_model.h"

#include "check.h"
#include "gguf_schema.h"

#include <algorithm>
#include <filesystem>
#include <ggml-cpp.h>
#include <gguf.h>
#include <initializer_list>
#include <random>
#include <vector>

using namespace dfl;

TemporaryFolder::TemporaryFolder() {
    std::string pattern = std::filesystem::temp_directory_path() / "dflash-test-XXXXXX";
    CHECK(mkdtemp(&pattern[0]) != nullptr);
    path_ = pattern;
}

TemporaryFolder::~TemporaryFolder() { std::filesystem::remove_all(path_); }

namespace {

struct Sizes {
    int64_t n_embd = 32, n_ff = 48, head_dim = 16, n_head = 2, n_head_kv = 1;
    int64_t d_state = 16, n_k_heads = 1, n_v_heads = 2, d_conv = 4;
    int64_t n_expert = 4, n_expert_used = 2;
};

// Rows that every quantised type's blocks fit.
constexpr Sizes WIDE = {256, 512, 64, 4, 2, 64, 2, 4, 4, 4, 2};

// A GGUF file in the making.
class Writer {
  public:
    const Sizes sizes;

    // type: of matrices that its blocks fit.
    explicit Writer(const std::string & arch, ggml_type type = GGML_TYPE_F32,
                    const Sizes & sizes = {})
        : sizes(sizes), arch_(arch), type_(type), gguf_(gguf_init_empty()),
          ctx_(ggml_init({1 << 25, nullptr, false})) {
        gguf_set_val_str(gguf_.get(), schema::KEY_GENERAL_ARCHITECTURE, arch.c_str());
    }

    std::string key(const char * pattern) const {
        std::string name = pattern;
        return name.replace(name.find("%s"), 2, arch_);
    }
    void integer(const char * pattern, int64_t value) {
        gguf_set_val_u32(gguf_.get(), key(pattern).c_str(), static_cast<uint32_t>(value));
    }
    void real(const char * pattern, float value) {
        gguf_set_val_f32(gguf_.get(), key(pattern).c_str(), value);
    }
    void integers(const char * pattern, std::initializer_list<int32_t> values) {
        gguf_set_arr_data(gguf_.get(), key(pattern).c_str(), GGUF_TYPE_INT32, values.begin(),
                          values.size());
    }

    // Values around `mean`, spread by one over the root of a row's length.
    void tensor(const char * pattern, int il, std::initializer_list<int64_t> ne, float mean = 0) {
        // Convolutions and other short rows stay float32.
        const bool fits =
            ne.size() > 1 && *ne.begin() >= 16 && *ne.begin() % ggml_blck_size(type_) == 0;
        add(fits ? type_ : GGML_TYPE_F32, pattern, il, ne, mean);
    }
    // Several vectors, which are float32 like one.
    void vectors(const char * pattern, int il, std::initializer_list<int64_t> ne) {
        add(GGML_TYPE_F32, pattern, il, ne, 0);
    }

    gguf_context * gguf() const { return gguf_.get(); }
    void save(const std::string & path) const {
        CHECK(gguf_write_to_file(gguf_.get(), path.c_str(), /*only_meta =*/false));
    }

  private:
    void add(ggml_type type, const char * pattern, int il, std::initializer_list<int64_t> ne,
             float mean) {
        ggml_tensor * t =
            ggml_new_tensor(ctx_.get(), type, static_cast<int>(ne.size()), ne.begin());
        std::string name = pattern;
        const size_t at = name.find("%d");
        ggml_set_name(t, at == std::string::npos ? pattern
                                                 : name.replace(at, 2, std::to_string(il)).c_str());
        std::normal_distribution<float> noise(mean, 1.0f / std::sqrt(float(*ne.begin())));
        std::vector<float> values(ggml_nelements(t));
        std::generate(values.begin(), values.end(), [&] { return noise(random_); });
        ggml_quantize_chunk(t->type, values.data(), t->data, 0, ggml_nrows(t), t->ne[0], nullptr);
        gguf_add_tensor(gguf_.get(), t);
    }

    std::string arch_;
    ggml_type type_;
    gguf_context_ptr gguf_;
    ggml_context_ptr ctx_;
    std::mt19937 random_{11};
};

// n_layer layers and embeddings of n_vocab tokens, or none.
void common(Writer & w, int64_t n_layer = 2, int64_t n_vocab = TINY_VOCAB) {
    const Sizes & z = w.sizes;
    w.integer(schema::KEY_CONTEXT_LENGTH, 512);
    w.integer(schema::KEY_EMBEDDING_LENGTH, z.n_embd);
    w.integer(schema::KEY_BLOCK_COUNT, n_layer);
    w.integer(schema::KEY_FEED_FORWARD_LENGTH, z.n_ff);
    w.integer(schema::KEY_ATTENTION_HEAD_COUNT, z.n_head);
    w.integer(schema::KEY_ATTENTION_HEAD_COUNT_KV, z.n_head_kv);
    w.integer(schema::KEY_ATTENTION_KEY_LENGTH, z.head_dim);
    w.real(schema::KEY_ATTENTION_LAYER_NORM_RMS_EPSILON, 1e-5f);
    if (n_vocab > 0) {
        w.tensor(schema::TENSOR_TOKEN_EMBD, 0, {z.n_embd, n_vocab});
    }
    w.tensor(schema::TENSOR_OUTPUT_NORM, 0, {z.n_embd}, 1);
}

void attention(Writer & w, int il, int64_t q_factor, bool head_norms) {
    const Sizes & z = w.sizes;
    const int64_t kv = z.head_dim * z.n_head_kv;
    w.tensor(schema::TENSOR_ATTN_Q, il, {z.n_embd, q_factor * z.head_dim * z.n_head});
    w.tensor(schema::TENSOR_ATTN_K, il, {z.n_embd, kv});
    w.tensor(schema::TENSOR_ATTN_V, il, {z.n_embd, kv});
    w.tensor(schema::TENSOR_ATTN_OUTPUT, il, {z.head_dim * z.n_head, z.n_embd});
    if (head_norms) {
        w.tensor(schema::TENSOR_ATTN_Q_NORM, il, {z.head_dim}, 1);
        w.tensor(schema::TENSOR_ATTN_K_NORM, il, {z.head_dim}, 1);
    }
}

void feed_forward(Writer & w, int il) {
    const Sizes & z = w.sizes;
    w.tensor(schema::TENSOR_FFN_GATE, il, {z.n_embd, z.n_ff});
    w.tensor(schema::TENSOR_FFN_UP, il, {z.n_embd, z.n_ff});
    w.tensor(schema::TENSOR_FFN_DOWN, il, {z.n_ff, z.n_embd});
}

void experts(Writer & w, int il, bool shared) {
    const Sizes & z = w.sizes;
    w.tensor(schema::TENSOR_FFN_GATE_INP, il, {z.n_embd, z.n_expert});
    w.tensor(schema::TENSOR_FFN_GATE_EXPS, il, {z.n_embd, z.n_ff, z.n_expert});
    w.tensor(schema::TENSOR_FFN_UP_EXPS, il, {z.n_embd, z.n_ff, z.n_expert});
    w.tensor(schema::TENSOR_FFN_DOWN_EXPS, il, {z.n_ff, z.n_embd, z.n_expert});
    if (shared) {
        w.tensor(schema::TENSOR_FFN_GATE_INP_SHEXP, il, {z.n_embd, 1});
        w.tensor(schema::TENSOR_FFN_GATE_SHEXP, il, {z.n_embd, z.n_ff});
        w.tensor(schema::TENSOR_FFN_UP_SHEXP, il, {z.n_embd, z.n_ff});
        w.tensor(schema::TENSOR_FFN_DOWN_SHEXP, il, {z.n_ff, z.n_embd});
    }
}

void expert_keys(Writer & w, bool shared) {
    w.integer(schema::KEY_EXPERT_COUNT, w.sizes.n_expert);
    w.integer(schema::KEY_EXPERT_USED_COUNT, w.sizes.n_expert_used);
    w.integer(schema::KEY_EXPERT_FEED_FORWARD_LENGTH, w.sizes.n_ff);
    if (shared) {
        w.integer(schema::KEY_EXPERT_SHARED_FEED_FORWARD_LENGTH, w.sizes.n_ff);
    }
}

void delta_net(Writer & w, int il, float dt_bias, bool grouped) {
    const Sizes & z = w.sizes;
    const int64_t channels = z.d_state * (2 * z.n_k_heads + z.n_v_heads);
    const int64_t inner = z.d_state * z.n_v_heads;
    w.tensor(schema::TENSOR_ATTN_QKV, il, {z.n_embd, channels});
    w.tensor(schema::TENSOR_ATTN_GATE, il, {z.n_embd, inner});
    w.tensor(schema::TENSOR_SSM_CONV1D, il, {z.d_conv, channels});
    w.tensor(schema::TENSOR_SSM_DT_BIAS, il, {z.n_v_heads}, dt_bias);
    w.tensor(schema::TENSOR_SSM_A, il, {z.n_v_heads}, -3);
    if (grouped) {
        w.tensor(schema::TENSOR_SSM_BETA_ALPHA, il, {z.n_embd, 2 * z.n_v_heads});
    } else {
        w.tensor(schema::TENSOR_SSM_BETA, il, {z.n_embd, z.n_v_heads});
        w.tensor(schema::TENSOR_SSM_ALPHA, il, {z.n_embd, z.n_v_heads});
    }
    w.tensor(schema::TENSOR_SSM_NORM, il, {z.d_state}, 1);
    w.tensor(schema::TENSOR_SSM_OUT, il, {inner, z.n_embd});
}

void attention_layers(Writer & w, int64_t n_layer, bool head_norms, bool of_experts) {
    for (int il = 0; il < n_layer; ++il) {
        w.tensor(schema::TENSOR_ATTN_NORM, il, {w.sizes.n_embd}, 1);
        attention(w, il, 1, head_norms);
        w.tensor(schema::TENSOR_FFN_NORM, il, {w.sizes.n_embd}, 1);
        of_experts ? experts(w, il, false) : feed_forward(w, il);
    }
}

void write_transformer(Writer & w, const std::string & path, bool head_norms, bool of_experts) {
    common(w);
    if (of_experts) {
        expert_keys(w, false);
    }
    attention_layers(w, 2, head_norms, of_experts);
    w.save(path);
}

// grouped: as Qwen3-Next's.
void write_hybrid(Writer & w, const std::string & path, float dt_bias, bool of_experts,
                  bool grouped = false) {
    const Sizes & z = w.sizes;
    common(w);
    if (of_experts) {
        expert_keys(w, true);
    }
    w.integer(schema::KEY_FULL_ATTENTION_INTERVAL, 2);
    w.integer(schema::KEY_ROPE_DIMENSION_COUNT, 8);
    if (!grouped) {
        w.integers(schema::KEY_ROPE_DIMENSION_SECTIONS, {2, 1, 1, 0});
    }
    w.integer(schema::KEY_SSM_CONV_KERNEL, z.d_conv);
    w.integer(schema::KEY_SSM_STATE_SIZE, z.d_state);
    w.integer(schema::KEY_SSM_GROUP_COUNT, z.n_k_heads);
    w.integer(schema::KEY_SSM_TIME_STEP_RANK, z.n_v_heads);
    w.integer(schema::KEY_SSM_INNER_SIZE, z.d_state * z.n_v_heads);
    for (int il = 0; il < 2; ++il) {
        w.tensor(schema::TENSOR_ATTN_NORM, il, {z.n_embd}, 1);
        if (il == 0) {
            delta_net(w, il, dt_bias, grouped);
        } else {
            attention(w, il, 2, true);
        }
        w.tensor(schema::TENSOR_POST_ATTENTION_NORM, il, {z.n_embd}, 1);
        of_experts ? experts(w, il, true) : feed_forward(w, il);
    }
    w.save(path);
}

void write_gpt_oss(Writer & w, const std::string & path) {
    const Sizes & z = w.sizes;
    common(w);
    expert_keys(w, false);
    w.integer(schema::KEY_ATTENTION_SLIDING_WINDOW, 8);
    for (int il = 0; il < 2; ++il) {
        w.tensor(schema::TENSOR_ATTN_NORM, il, {z.n_embd}, 1);
        attention(w, il, 1, false);
        w.tensor(schema::TENSOR_ATTN_Q_BIAS, il, {z.head_dim * z.n_head});
        w.tensor(schema::TENSOR_ATTN_K_BIAS, il, {z.head_dim * z.n_head_kv});
        w.tensor(schema::TENSOR_ATTN_V_BIAS, il, {z.head_dim * z.n_head_kv});
        w.tensor(schema::TENSOR_ATTN_OUTPUT_BIAS, il, {z.n_embd});
        w.tensor(schema::TENSOR_ATTN_SINKS, il, {z.n_head});
        w.tensor(schema::TENSOR_POST_ATTENTION_NORM, il, {z.n_embd}, 1);
        experts(w, il, false);
        w.tensor(schema::TENSOR_FFN_GATE_INP_BIAS, il, {z.n_expert});
        w.vectors(schema::TENSOR_FFN_GATE_EXPS_BIAS, il, {z.n_ff, z.n_expert});
        w.vectors(schema::TENSOR_FFN_UP_EXPS_BIAS, il, {z.n_ff, z.n_expert});
        w.vectors(schema::TENSOR_FFN_DOWN_EXPS_BIAS, il, {z.n_embd, z.n_expert});
    }
    w.save(path);
}

// Six layers, of which the last one is full.
void write_gemma3(Writer & w, const std::string & path) {
    const Sizes & z = w.sizes;
    constexpr int64_t n_layer = 6;
    common(w, n_layer);
    w.integer(schema::KEY_ATTENTION_SLIDING_WINDOW, 8);
    attention_layers(w, n_layer, true, false);
    for (int il = 0; il < n_layer; ++il) {
        w.tensor(schema::TENSOR_POST_ATTENTION_NORM, il, {z.n_embd}, 1);
        w.tensor(schema::TENSOR_POST_FFW_NORM, il, {z.n_embd}, 1);
    }
    w.save(path);
}

// A sliding layer and a full one, whose keys are its values.
void write_gemma4(Writer & w, const std::string & path, bool of_experts) {
    const Sizes & z = w.sizes;
    common(w);
    if (of_experts) {
        expert_keys(w, false);
    }
    w.integer(schema::KEY_ATTENTION_SLIDING_WINDOW, 8);
    w.integers(schema::KEY_ATTENTION_SLIDING_WINDOW_PATTERN, {1, 0});
    for (int il = 0; il < 2; ++il) {
        const int64_t kv = z.head_dim * z.n_head_kv;
        w.tensor(schema::TENSOR_ATTN_NORM, il, {z.n_embd}, 1);
        w.tensor(schema::TENSOR_ATTN_Q, il, {z.n_embd, z.head_dim * z.n_head});
        w.tensor(schema::TENSOR_ATTN_K, il, {z.n_embd, kv});
        if (il == 0) {
            w.tensor(schema::TENSOR_ATTN_V, il, {z.n_embd, kv});
        }
        w.tensor(schema::TENSOR_ATTN_OUTPUT, il, {z.head_dim * z.n_head, z.n_embd});
        w.tensor(schema::TENSOR_ATTN_Q_NORM, il, {z.head_dim}, 1);
        w.tensor(schema::TENSOR_ATTN_K_NORM, il, {z.head_dim}, 1);
        for (const char * norm : {schema::TENSOR_POST_ATTENTION_NORM, schema::TENSOR_FFN_NORM,
                                  schema::TENSOR_POST_FFW_NORM}) {
            w.tensor(norm, il, {z.n_embd}, 1);
        }
        feed_forward(w, il);
        if (of_experts) {
            w.tensor(schema::TENSOR_FFN_GATE_INP, il, {z.n_embd, z.n_expert});
            w.tensor(schema::TENSOR_FFN_GATE_INP_SCALE, il, {z.n_embd}, 1);
            w.tensor(schema::TENSOR_FFN_GATE_UP_EXPS, il, {z.n_embd, 2 * z.n_ff, z.n_expert});
            w.tensor(schema::TENSOR_FFN_DOWN_EXPS, il, {z.n_ff, z.n_embd, z.n_expert});
            w.tensor(schema::TENSOR_FFN_DOWN_EXPS_SCALE, il, {z.n_expert}, 1);
            for (const char * norm : {schema::TENSOR_PRE_FFW_NORM_2, schema::TENSOR_POST_FFW_NORM_1,
                                      schema::TENSOR_POST_FFW_NORM_2}) {
                w.tensor(norm, il, {z.n_embd}, 1);
            }
        }
        w.tensor(schema::TENSOR_LAYER_OUTPUT_SCALE, il, {1}, 1);
    }
    w.save(path);
}

} // namespace

void write_tiny_llama(const std::string & path) {
    Writer w(schema::ARCH_LLAMA);
    write_transformer(w, path, false, false);
}

void write_tiny_qwen35(const std::string & path) {
    Writer w(schema::ARCH_QWEN35);
    write_hybrid(w, path, 0, false);
}

void write_lasting_qwen35(const std::string & path) {
    Writer w(schema::ARCH_QWEN35);
    write_hybrid(w, path, -7, false);
}

void write_wide(const std::string & arch, ggml_type type, const std::string & path) {
    Writer w(arch, type, WIDE);
    if (arch == schema::ARCH_LLAMA || arch == schema::ARCH_QWEN2) {
        write_transformer(w, path, false, false);
    } else if (arch == schema::ARCH_QWEN3 || arch == schema::ARCH_QWEN3MOE) {
        write_transformer(w, path, true, arch == schema::ARCH_QWEN3MOE);
    } else if (arch == schema::ARCH_GEMMA3) {
        write_gemma3(w, path);
    } else if (arch == schema::ARCH_GPT_OSS) {
        write_gpt_oss(w, path);
    } else if (arch == schema::ARCH_GEMMA4) {
        write_gemma4(w, path, false);
    } else {
        const bool grouped = arch == schema::ARCH_QWEN3NEXT;
        CHECK(grouped || arch == schema::ARCH_QWEN35 || arch == schema::ARCH_QWEN35MOE);
        write_hybrid(w, path, 0, arch != schema::ARCH_QWEN35, grouped);
    }
}

void write_wide_gemma4_experts(ggml_type type, const std::string & path) {
    Writer w(schema::ARCH_GEMMA4, type, WIDE);
    write_gemma4(w, path, true);
}

void write_wide_drafter(ggml_type type, const std::string & path) {
    Writer w(schema::ARCH_DFLASH, type, WIDE);
    common(w, 2, 0);
    w.integer(schema::KEY_BLOCK_SIZE, 8);
    w.integers(schema::KEY_TARGET_LAYERS, {0, 1});
    gguf_set_val_u32(w.gguf(), schema::KEY_TOKENIZER_MASK_ID, TINY_VOCAB - 1);
    w.tensor(schema::TENSOR_FC, 0, {2 * WIDE.n_embd, WIDE.n_embd});
    w.tensor(schema::TENSOR_ENC_OUTPUT_NORM, 0, {WIDE.n_embd}, 1);
    attention_layers(w, 2, true, false);
    w.save(path);
}
