#include "model/hparams.h"

#include "error.h"
#include "gguf_schema.h"
#include "model/gguf_file.h"

#include <algorithm>
#include <cmath>
#include <ggml.h>

namespace dfl {

namespace {

constexpr int64_t MAX_LAYERS = 1024;
constexpr int64_t MAX_WIDTH = 1 << 20;
constexpr int64_t MAX_VOCAB = 1 << 24;

// Returns the number of a key, or by_default if the key is missing or zero.
double number_or(const GgufFile & file, const char * key, double by_default) {
    const double value = file.real(key).value_or(0.0);
    DFL_CHECK(std::isfinite(value) && value >= 0.0, DFL_STATUS_FILE,
              "%s: %s is %g, expected a positive number", file.path().c_str(),
              file.key(key).c_str(), value);
    return value == 0.0 ? by_default : value;
}

// Reads the scaling of rope. Source: llama.cpp, llama_context::llama_context; other keys:
// transformers, modeling_rope_utils.py, _compute_yarn_parameters.
void read_rope_scaling(const GgufFile & file, int64_t n_ctx_train, RopeShape & rope) {
    const std::string scaling = file.text(schema::KEY_ROPE_SCALING_TYPE).value_or("linear");
    DFL_CHECK(scaling == "linear" || scaling == "none" || scaling == "yarn", DFL_STATUS_UNSUPPORTED,
              "%s: %s is \"%.32s\", supported are none, linear and yarn", file.path().c_str(),
              file.key(schema::KEY_ROPE_SCALING_TYPE).c_str(), scaling.c_str());
    double factor = number_or(file, schema::KEY_ROPE_SCALE_LINEAR, 1.0);
    factor = number_or(file, schema::KEY_ROPE_SCALING_FACTOR, factor);
    if (scaling == "none") {
        factor = 1.0;
    }
    rope.freq_scale = static_cast<float>(1.0 / factor);
    const char * original = schema::KEY_ROPE_SCALING_ORIGINAL_CONTEXT_LENGTH;
    const bool has_type = file.has(original);
    rope.n_ctx_orig = static_cast<int>(has_type ? file.need_integer(original, 0, INT32_MAX) : 0);
    if (rope.n_ctx_orig == 0) {
        rope.n_ctx_orig = static_cast<int>(n_ctx_train);
    }
    rope.beta_fast = static_cast<float>(
        number_or(file, schema::KEY_ROPE_SCALING_YARN_BETA_FAST, rope.beta_fast));
    rope.beta_slow = static_cast<float>(
        number_or(file, schema::KEY_ROPE_SCALING_YARN_BETA_SLOW, rope.beta_slow));
    const double ext = file.real(schema::KEY_ROPE_SCALING_YARN_EXT_FACTOR).value_or(-1.0);
    DFL_CHECK(std::isfinite(ext), DFL_STATUS_FILE, "%s: %s is %g, expected a number",
              file.path().c_str(), file.key(schema::KEY_ROPE_SCALING_YARN_EXT_FACTOR).c_str(), ext);
    rope.ext_factor = ext >= 0.0 ? static_cast<float>(ext) : scaling == "yarn" ? 1.0f : 0.0f;
    const bool ramps = rope.ext_factor != 0.0f;

    // ggml's YaRN multiplies by 1 + 0.1 ln(factor), which Hugging Face's attention_factor replaces.
    const double own = ramps ? 1.0 + 0.1 * std::log(factor) : 1.0;
    DFL_CHECK(own > 0.0, DFL_STATUS_FILE, "%s: %s is %g, must be above 4.6e-5 for yarn",
              file.path().c_str(), file.key(schema::KEY_ROPE_SCALING_FACTOR).c_str(), factor);
    double all =
        number_or(file, schema::KEY_ROPE_SCALING_YARN_ATTN_FACTOR, factor > 1.0 ? own : 1.0);
    // To mean an attention factor of 1, some files (DeepSeek-R1-0528-Qwen3-8B) store the inverse of
    // ggml's 1 + 0.1 ln(factor).
    if (ramps && std::fabs(all * own - 1.0) < 1e-5) {
        all = 1.0;
    }
    rope.attn_factor =
        static_cast<float>(all / own * number_or(file, schema::KEY_ROPE_SCALING_ATTN_FACTOR, 1.0));
}

// Replaces YaRN by frequency factors, for models that do not round the bounds of its ramp as ggml
// does.
// Source: transformers, modeling_rope_utils.py, _compute_yarn_parameters.
void ramp_by_factors(RopeShape & rope) {
    const double base = rope.freq_base, pi = 3.14159265358979323846;
    const auto pair_of_rotations = [&](double rotations) {
        return rope.n_dims * std::log(rope.n_ctx_orig / (rotations * 2 * pi)) /
               (2 * std::log(base));
    };
    const double low = std::max(pair_of_rotations(rope.beta_fast), 0.0);
    const double high = std::min(pair_of_rotations(rope.beta_slow), rope.n_dims - 1.0);
    for (int i = 0; i < rope.n_dims / 2; ++i) {
        const double along = (i - low) / std::max(high - low, 0.001);
        const double extrapolated = rope.ext_factor * (1.0 - std::clamp(along, 0.0, 1.0));
        rope.factors.push_back(
            static_cast<float>(1.0 / ((1.0 - extrapolated) * rope.freq_scale + extrapolated)));
    }
    rope.attn_factor *= static_cast<float>(1.0 - 0.1 * std::log(rope.freq_scale));
    rope.freq_scale = 1.0f;
    rope.ext_factor = 0.0f;
}

// Returns the name of metadata key `sliding` if the layer slides and the file has it, else `all`.
const char * key_for(const GgufFile & file, bool slides, const char * sliding, const char * all) {
    return slides && file.has(sliding) ? sliding : all;
}

RopeShape read_rope(const GgufFile & file, const HparamRules & rules, const LayerShape & layer,
                    int64_t n_ctx_train) {
    const bool slides = layer.window > 0;
    RopeShape rope;
    rope.type = rules.rope_type;
    const char * dims = key_for(file, slides, schema::KEY_ROPE_DIMENSION_COUNT_SWA,
                                schema::KEY_ROPE_DIMENSION_COUNT);
    rope.n_dims = static_cast<int>(file.integer(dims).value_or(layer.head_dim));
    DFL_CHECK(rope.n_dims > 0 && rope.n_dims % 2 == 0 && rope.n_dims <= layer.head_dim,
              DFL_STATUS_FILE, "%s: %s is %d, expected an even number up to the head size %lld",
              file.path().c_str(), file.key(dims).c_str(), rope.n_dims, (long long)layer.head_dim);
    const char * base =
        key_for(file, slides, schema::KEY_ROPE_FREQ_BASE_SWA, schema::KEY_ROPE_FREQ_BASE);
    rope.freq_base = static_cast<float>(file.real(base).value_or(10000.0));
    DFL_CHECK(rope.freq_base > 0 && std::isfinite(rope.freq_base), DFL_STATUS_FILE,
              "%s: %s is %g, expected a positive number", file.path().c_str(),
              file.key(base).c_str(), rope.freq_base);

    read_rope_scaling(file, n_ctx_train, rope);
    const bool truncates =
        file.boolean(schema::KEY_ROPE_SCALING_YARN_TRUNCATE).value_or(rules.truncates_yarn);
    if (!truncates && rope.ext_factor != 0.0f) {
        ramp_by_factors(rope);
    }
    return rope;
}

// Returns the sliding layers: files have a list, or a number n that leaves every n-th layer full.
std::vector<bool> sliding_layers(const GgufFile & file, int64_t n_layer, int64_t default_period) {
    const char * key = schema::KEY_ATTENTION_SLIDING_WINDOW_PATTERN;
    const bool listed = file.is_array(key);
    const auto pattern = listed ? *file.integers(key) : std::vector<int64_t>(n_layer);
    const int64_t period = listed ? 1 : file.integer(key).value_or(default_period);
    DFL_CHECK((int64_t)pattern.size() >= n_layer && period >= 1, DFL_STATUS_FILE,
              "%s: metadata key %s must say for each of %lld layers whether it has a window",
              file.path().c_str(), file.key(key).c_str(), (long long)n_layer);
    std::vector<bool> slides;
    for (int64_t il = 0; il < n_layer; ++il) {
        slides.push_back(listed ? pattern[il] != 0 : il % period != period - 1);
    }
    return slides;
}

void read_windows(const GgufFile & file, Hparams & hp, int64_t default_period) {
    const char * key = schema::KEY_ATTENTION_SLIDING_WINDOW;
    const int64_t window = file.has(key) ? file.need_integer(key, 0, INT32_MAX) : 0;
    if (window == 0) {
        return;
    }
    const std::vector<bool> slides = sliding_layers(file, hp.n_layer(), default_period);
    for (int64_t il = 0; il < hp.n_layer(); ++il) {
        hp.layers[il].window = slides[il] ? window : 0;
    }
}

void read_heads(const GgufFile & file, int64_t n_embd, LayerShape & layer) {
    const bool slides = layer.window > 0;
    const char * key_length = key_for(file, slides, schema::KEY_ATTENTION_KEY_LENGTH_SWA,
                                      schema::KEY_ATTENTION_KEY_LENGTH);
    const char * value_length = key_for(file, slides, schema::KEY_ATTENTION_VALUE_LENGTH_SWA,
                                        schema::KEY_ATTENTION_VALUE_LENGTH);
    layer.head_dim =
        file.has(key_length) ? file.need_integer(key_length, 1, MAX_WIDTH) : n_embd / layer.n_head;
    const int64_t value_dim = file.integer(value_length).value_or(layer.head_dim);
    DFL_CHECK(layer.head_dim > 0 && value_dim == layer.head_dim, DFL_STATUS_UNSUPPORTED,
              "%s: value head size %lld differs from key head size %lld, they must be equal",
              file.path().c_str(), (long long)value_dim, (long long)layer.head_dim);
    layer.attn_scale = static_cast<float>(
        number_or(file, schema::KEY_ATTENTION_SCALE, 1.0 / std::sqrt(double(layer.head_dim))));
}

} // namespace

int64_t RopeShape::n_position_ids() const { return (type & GGML_ROPE_TYPE_MROPE) != 0 ? 4 : 1; }

bool RopeShape::operator==(const RopeShape & o) const {
    return type == o.type && n_dims == o.n_dims && std::equal(sections, sections + 4, o.sections) &&
           n_ctx_orig == o.n_ctx_orig && freq_base == o.freq_base && freq_scale == o.freq_scale &&
           ext_factor == o.ext_factor && attn_factor == o.attn_factor && beta_fast == o.beta_fast &&
           beta_slow == o.beta_slow && takes_factors == o.takes_factors && factors == o.factors;
}

int64_t Hparams::n_recurrent() const {
    return std::count_if(layers.begin(), layers.end(),
                         [](auto & layer) { return layer.recurrent; });
}

Hparams read_common_hparams(const GgufFile & file, const HparamRules & rules) {
    Hparams hp;
    hp.n_embd = file.need_integer(schema::KEY_EMBEDDING_LENGTH, 1, MAX_WIDTH);
    hp.n_ctx_train = file.need_integer(schema::KEY_CONTEXT_LENGTH, 1, INT32_MAX);
    const char * eps_key = schema::KEY_ATTENTION_LAYER_NORM_RMS_EPSILON;
    const bool has_eps = file.has(eps_key) || !rules.default_eps;
    hp.eps = static_cast<float>(has_eps ? file.need_real(eps_key) : *rules.default_eps);
    DFL_CHECK(hp.eps >= 0.0f && hp.eps < 1.0f, DFL_STATUS_FILE, "%s: %s is %g, expected 0 to 1",
              file.path().c_str(), file.key(eps_key).c_str(), hp.eps);

    const int64_t n_block = file.need_integer(schema::KEY_BLOCK_COUNT, 1, MAX_LAYERS);
    const int64_t n_nextn = file.integer(schema::KEY_NEXTN_PREDICT_LAYERS).value_or(0);
    DFL_CHECK(n_nextn >= 0 && n_nextn < n_block, DFL_STATUS_FILE,
              "%s: %lld MTP blocks of %lld blocks leave no layer to run", file.path().c_str(),
              (long long)n_nextn, (long long)n_block);
    const int64_t n_layer = n_block - n_nextn;

    const auto n_head =
        file.need_per_layer(schema::KEY_ATTENTION_HEAD_COUNT, n_layer, 1, MAX_WIDTH);
    const auto n_head_kv =
        file.has(schema::KEY_ATTENTION_HEAD_COUNT_KV)
            ? file.need_per_layer(schema::KEY_ATTENTION_HEAD_COUNT_KV, n_layer, 1, MAX_WIDTH)
            : n_head;
    const auto n_ff =
        file.has(schema::KEY_FEED_FORWARD_LENGTH)
            ? file.need_per_layer(schema::KEY_FEED_FORWARD_LENGTH, n_layer, 0, MAX_WIDTH)
            : std::vector<int64_t>(n_layer, 0);
    hp.layers.resize(n_layer);
    if (rules.sliding_period) {
        read_windows(file, hp, *rules.sliding_period);
    }
    for (int64_t il = 0; il < n_layer; ++il) {
        LayerShape & layer = hp.layers[il];
        layer.n_head = n_head[il];
        layer.n_head_kv = n_head_kv[il];
        layer.n_ff = n_ff[il];
        DFL_CHECK(layer.n_head % layer.n_head_kv == 0, DFL_STATUS_FILE,
                  "%s: layer %lld has %lld heads, not a multiple of its %lld K/V heads",
                  file.path().c_str(), (long long)il, (long long)layer.n_head,
                  (long long)layer.n_head_kv);
        read_heads(file, hp.n_embd, layer);
        layer.rope = read_rope(file, rules, layer, hp.n_ctx_train);
    }
    return hp;
}

void read_rope_sections(const GgufFile & file, Hparams & hp) {
    const std::vector<int64_t> sections = *file.integers(schema::KEY_ROPE_DIMENSION_SECTIONS);
    const std::string key = file.key(schema::KEY_ROPE_DIMENSION_SECTIONS);
    for (LayerShape & layer : hp.layers) {
        const int n_dims = layer.rope.n_dims;
        int64_t sum = 0;
        for (size_t i = 0; i < sections.size(); ++i) {
            DFL_CHECK(sections[i] >= 0 && sections[i] <= n_dims, DFL_STATUS_FILE,
                      "%s: metadata key %s has a section of %lld, expected 0 to %d",
                      file.path().c_str(), key.c_str(), (long long)sections[i], n_dims);
            layer.rope.sections[i] = static_cast<int>(sections[i]);
            sum += sections[i];
        }
        DFL_CHECK(sum >= 1 && sum <= n_dims, DFL_STATUS_FILE,
                  "%s: metadata key %s has sections of %lld dimensions in all, expected 1 to %d",
                  file.path().c_str(), key.c_str(), (long long)sum, n_dims);
    }
}

void read_scales(const GgufFile & file, Hparams & hp) {
    const auto read = [&](const char * key, float & scale) {
        scale = static_cast<float>(number_or(file, key, scale));
    };
    read(schema::KEY_EMBEDDING_SCALE, hp.embedding_scale);
    read(schema::KEY_ATTENTION_VALUE_SCALE, hp.value_scale);
    read(schema::KEY_LOGIT_SCALE, hp.logit_scale);
    hp.logit_softcap = static_cast<float>(
        file.real(schema::KEY_FINAL_LOGIT_SOFTCAPPING).value_or(hp.logit_softcap));
}

int64_t read_vocab_size(const GgufFile & file) {
    const ggml_tensor * embd = file.tensor(schema::TENSOR_TOKEN_EMBD);
    DFL_CHECK(embd != nullptr, DFL_STATUS_FILE, "%s: tensor %s is missing", file.path().c_str(),
              schema::TENSOR_TOKEN_EMBD);
    const int64_t n_vocab = embd->ne[1];
    const int64_t n_tokens = file.array_length(schema::KEY_TOKENIZER_TOKENS).value_or(n_vocab);
    DFL_CHECK(n_vocab > 0 && n_vocab <= MAX_VOCAB && n_tokens == n_vocab, DFL_STATUS_FILE,
              "%s: tensor %s has %lld rows, the tokenizer has %lld tokens", file.path().c_str(),
              schema::TENSOR_TOKEN_EMBD, (long long)n_vocab, (long long)n_tokens);
    return n_vocab;
}

ExpertShape read_expert_shape(const GgufFile & file, bool shared) {
    ExpertShape experts;
    experts.n_expert = file.need_integer(schema::KEY_EXPERT_COUNT, 1, 4096);
    experts.n_used = file.need_integer(schema::KEY_EXPERT_USED_COUNT, 1, experts.n_expert);
    const int64_t n_ff = file.integer(schema::KEY_FEED_FORWARD_LENGTH).value_or(0);
    experts.n_ff = file.has(schema::KEY_EXPERT_FEED_FORWARD_LENGTH)
                       ? file.need_integer(schema::KEY_EXPERT_FEED_FORWARD_LENGTH, 1, MAX_WIDTH)
                       : n_ff / experts.n_used;
    if (shared) {
        experts.n_ff_shared =
            file.has(schema::KEY_EXPERT_SHARED_FEED_FORWARD_LENGTH)
                ? file.need_integer(schema::KEY_EXPERT_SHARED_FEED_FORWARD_LENGTH, 1, MAX_WIDTH)
                : n_ff;
    }
    DFL_CHECK(
        experts.n_ff > 0 && (!shared || experts.n_ff_shared > 0), DFL_STATUS_FILE,
        "%s: metadata key expert_feed_forward_length (or that of the shared expert) is missing",
        file.path().c_str());
    return experts;
}

} // namespace dfl
