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

constexpr int64_t N_EMBD = 32, N_FF = 48, HEAD_DIM = 16, N_HEAD = 2, N_HEAD_KV = 1;
constexpr int64_t D_STATE = 16, N_K_HEADS = 1, N_V_HEADS = 2, D_CONV = 4;

// A GGUF file in the making.
class Writer {
  public:
    // type: of matrices that its blocks fit.
    explicit Writer(const char * arch, ggml_type type = GGML_TYPE_F32)
        : arch_(arch), type_(type), gguf_(gguf_init_empty()),
          ctx_(ggml_init({1 << 22, nullptr, false})) {
        gguf_set_val_str(gguf_.get(), schema::KEY_GENERAL_ARCHITECTURE, arch);
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
        const bool fits = ne.size() > 1 && *ne.begin() % ggml_blck_size(type_) == 0;
        ggml_tensor * t = ggml_new_tensor(ctx_.get(), fits ? type_ : GGML_TYPE_F32,
                                          static_cast<int>(ne.size()), ne.begin());
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
    void save(const std::string & path) const {
        CHECK(gguf_write_to_file(gguf_.get(), path.c_str(), /*only_meta =*/false));
    }

  private:
    std::string arch_;
    ggml_type type_;
    gguf_context_ptr gguf_;
    ggml_context_ptr ctx_;
    std::mt19937 random_{11};
};

void common(Writer & w) {
    w.integer(schema::KEY_CONTEXT_LENGTH, 512);
    w.integer(schema::KEY_EMBEDDING_LENGTH, N_EMBD);
    w.integer(schema::KEY_BLOCK_COUNT, 2);
    w.integer(schema::KEY_FEED_FORWARD_LENGTH, N_FF);
    w.integer(schema::KEY_ATTENTION_HEAD_COUNT, N_HEAD);
    w.integer(schema::KEY_ATTENTION_HEAD_COUNT_KV, N_HEAD_KV);
    w.integer(schema::KEY_ATTENTION_KEY_LENGTH, HEAD_DIM);
    w.real(schema::KEY_ATTENTION_LAYER_NORM_RMS_EPSILON, 1e-5f);
    w.tensor(schema::TENSOR_TOKEN_EMBD, 0, {N_EMBD, TINY_VOCAB});
    w.tensor(schema::TENSOR_OUTPUT_NORM, 0, {N_EMBD}, 1);
}

void attention(Writer & w, int il, int64_t q_width) {
    w.tensor(schema::TENSOR_ATTN_Q, il, {N_EMBD, q_width});
    w.tensor(schema::TENSOR_ATTN_K, il, {N_EMBD, HEAD_DIM * N_HEAD_KV});
    w.tensor(schema::TENSOR_ATTN_V, il, {N_EMBD, HEAD_DIM * N_HEAD_KV});
    w.tensor(schema::TENSOR_ATTN_OUTPUT, il, {HEAD_DIM * N_HEAD, N_EMBD});
}

void feed_forward(Writer & w, int il) {
    w.tensor(schema::TENSOR_FFN_GATE, il, {N_EMBD, N_FF});
    w.tensor(schema::TENSOR_FFN_UP, il, {N_EMBD, N_FF});
    w.tensor(schema::TENSOR_FFN_DOWN, il, {N_FF, N_EMBD});
}

void delta_net(Writer & w, int il, float dt_bias) {
    const int64_t channels = D_STATE * (2 * N_K_HEADS + N_V_HEADS), inner = D_STATE * N_V_HEADS;
    w.tensor(schema::TENSOR_ATTN_QKV, il, {N_EMBD, channels});
    w.tensor(schema::TENSOR_ATTN_GATE, il, {N_EMBD, inner});
    w.tensor(schema::TENSOR_SSM_CONV1D, il, {D_CONV, channels});
    w.tensor(schema::TENSOR_SSM_DT_BIAS, il, {N_V_HEADS}, dt_bias);
    w.tensor(schema::TENSOR_SSM_A, il, {N_V_HEADS}, -3);
    w.tensor(schema::TENSOR_SSM_BETA, il, {N_EMBD, N_V_HEADS});
    w.tensor(schema::TENSOR_SSM_ALPHA, il, {N_EMBD, N_V_HEADS});
    w.tensor(schema::TENSOR_SSM_NORM, il, {D_STATE}, 1);
    w.tensor(schema::TENSOR_SSM_OUT, il, {inner, N_EMBD});
}

} // namespace

void write_tiny_llama(const std::string & path) {
    Writer w(schema::ARCH_LLAMA);
    common(w);
    for (int il = 0; il < 2; ++il) {
        w.tensor(schema::TENSOR_ATTN_NORM, il, {N_EMBD}, 1);
        attention(w, il, HEAD_DIM * N_HEAD);
        w.tensor(schema::TENSOR_FFN_NORM, il, {N_EMBD}, 1);
        feed_forward(w, il);
    }
    w.save(path);
}

static void write_hybrid(const std::string & path, float dt_bias, ggml_type type = GGML_TYPE_F32) {
    Writer w(schema::ARCH_QWEN35, type);
    common(w);
    w.integer(schema::KEY_FULL_ATTENTION_INTERVAL, 2);
    w.integer(schema::KEY_ROPE_DIMENSION_COUNT, 8);
    w.integers(schema::KEY_ROPE_DIMENSION_SECTIONS, {2, 1, 1, 0});
    w.integer(schema::KEY_SSM_CONV_KERNEL, D_CONV);
    w.integer(schema::KEY_SSM_STATE_SIZE, D_STATE);
    w.integer(schema::KEY_SSM_GROUP_COUNT, N_K_HEADS);
    w.integer(schema::KEY_SSM_TIME_STEP_RANK, N_V_HEADS);
    w.integer(schema::KEY_SSM_INNER_SIZE, D_STATE * N_V_HEADS);
    for (int il = 0; il < 2; ++il) {
        w.tensor(schema::TENSOR_ATTN_NORM, il, {N_EMBD}, 1);
        if (il == 0) {
            delta_net(w, il, dt_bias);
        } else {
            attention(w, il, 2 * HEAD_DIM * N_HEAD);
            w.tensor(schema::TENSOR_ATTN_Q_NORM, il, {HEAD_DIM}, 1);
            w.tensor(schema::TENSOR_ATTN_K_NORM, il, {HEAD_DIM}, 1);
        }
        w.tensor(schema::TENSOR_POST_ATTENTION_NORM, il, {N_EMBD}, 1);
        feed_forward(w, il);
    }
    w.save(path);
}

void write_tiny_qwen35(const std::string & path) { write_hybrid(path, 0); }

void write_lasting_qwen35(const std::string & path) { write_hybrid(path, -7); }

void write_quantized_qwen35(const std::string & path) { write_hybrid(path, 0, GGML_TYPE_Q8_0); }
