// Shapes of a model, read from its file. Attention, caches and memory plans depend on these alone,
// never on the architecture's name.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace dfl {

class GgufFile;

struct RopeShape {
    int type = 0; // mode constant of ggml_rope (GGML_ROPE_TYPE_*)
    int n_dims = 0;
    int sections[4] = {0, 0, 0, 0};
    int n_ctx_orig = 0;
    float freq_base = 10000.0f;
    float freq_scale = 1.0f;
    float ext_factor = 0.0f;
    float attn_factor = 1.0f;
    // YaRN keeps pairs above beta_fast rotations in n_ctx_orig, interpolates below beta_slow.
    float beta_fast = 32.0f;
    float beta_slow = 1.0f;
    bool takes_factors = true;       // true: rope divides frequencies by rope_freqs.weight
    std::vector<float> factors = {}; // divisors of frequencies in place of YaRN, [n_dims / 2]

    // Returns the position ids per row: M-RoPE takes 4 (time, height, width and another).
    int64_t n_position_ids() const;
    bool operator==(const RopeShape & o) const;
};

// Activation of a gate g, which is multiplied with u.
enum class Activation {
    SILU,
    GELU,         // GELU by the tanh approximation
    CLAMPED_SILU, // gpt-oss: g sigmoid(1.702 g) (u + 1), g at most 7, |u| at most 7
};

// Constants of the clamped SiLU of gpt-oss.
constexpr float GATE_SHARPNESS = 1.702f, GATE_LIMIT = 7.0f;

struct LayerShape {
    bool recurrent = false;
    int64_t n_head = 0;
    int64_t n_head_kv = 0;
    int64_t head_dim = 0;
    int64_t window = 0;        // number of positions a row attends to, its own included; 0: all
    bool causal = true;        // false: rows attend to later positions too
    bool value_is_key = false; // true: in layers without V weights, V is the normed K projection
    bool norms_values = false; // true: V is normed, by a norm without a weight
    int64_t kv_layer = -1;     // layer whose K and V this layer reads; -1: its own
    float attn_scale = 0.0f;
    RopeShape rope;
    int64_t n_ff = 0;
    Activation activation = Activation::SILU;
};

struct RecurrentShape {
    int64_t d_conv = 0;  // number of taps of the convolution
    int64_t d_state = 0; // head size of keys and values
    int64_t n_k_heads = 0;
    int64_t n_v_heads = 0;
    bool grouped = false; // true: value heads of a key head are adjacent, not n_k_heads apart

    int64_t values_a_key() const { return n_v_heads / n_k_heads; }
    // Map a value head to its key head and its place among that key head's value heads, and back.
    int64_t key_of(int64_t head) const {
        return grouped ? head / values_a_key() : head % n_k_heads;
    }
    int64_t place_of(int64_t head) const {
        return grouped ? head % values_a_key() : head / n_k_heads;
    }
    int64_t value_head(int64_t key, int64_t place) const {
        return grouped ? key * values_a_key() + place : place * n_k_heads + key;
    }
    int64_t conv_channels() const { return d_state * (2 * n_k_heads + n_v_heads); }
    // Returns the number of values of a node update: k, v, g and beta.
    int64_t node_update_size() const { return d_state * (n_k_heads + n_v_heads) + 2 * n_v_heads; }
    int64_t state_size() const { return d_state * d_state * n_v_heads; }
};

struct ExpertShape {
    int64_t n_expert = 0;
    int64_t n_used = 0;
    int64_t n_ff = 0;
    int64_t n_ff_shared = 0;
    Activation activation = Activation::SILU;
};

struct Hparams {
    int64_t n_vocab = 0;
    int64_t n_embd = 0;
    int64_t n_ctx_train = 0;
    float eps = 0.0f;
    std::vector<LayerShape> layers; // layers that are run: no multi-token-prediction (MTP) blocks
    RecurrentShape recurrent;
    ExpertShape experts;
    int64_t n_per_layer = 0; // width of a per-layer token embedding; 0: none
    float embedding_scale = 1.0f;
    float value_scale = 1.0f; // factor of the output of each attention layer
    float logit_scale = 1.0f;
    float logit_softcap = 0.0f; // cap c: logits become c * tanh(logits / c); 0: no cap

    int64_t n_layer() const { return static_cast<int64_t>(layers.size()); }
    int64_t n_recurrent() const;
};

// Rules of an architecture for read_common_hparams() that metadata does not contain.
struct HparamRules {
    int rope_type = 0;
    std::optional<double> default_eps = {};
    // Layers that slide by default: all but every n-th; 0: files must list them; empty: no windows.
    std::optional<int64_t> sliding_period = {};
    bool truncates_yarn = true; // true: the bounds of YaRN's ramp are rounded by default
};

// Reads the parameters that all decoder architectures have. Sliding layers get their own head size
// and rope if the file has them. n_vocab is left to read_vocab_size().
Hparams read_common_hparams(const GgufFile & file, const HparamRules & rules);

// Reads rope sections into all layers. Throws unless their sum is 1 to n_dims, as ggml would abort.
void read_rope_sections(const GgufFile & file, Hparams & hp);

// Reads the scales of embeddings, attention outputs and logits, and the softcap; missing keys keep
// the defaults. Architectures that do not call this refuse files with such keys.
void read_scales(const GgufFile & file, Hparams & hp);

// Returns the rows of the token embeddings; throws unless the tokenizer has as many tokens.
int64_t read_vocab_size(const GgufFile & file);

// Reads the keys of a mixture of experts. shared: the model also has a shared expert.
ExpertShape read_expert_shape(const GgufFile & file, bool shared);

// Throws DFL_STATUS_UNSUPPORTED naming the first key of the architecture that was not read, unless
// the key or its value has no effect. Call after all hyper-parameters are read.
void check_no_key_skipped(const GgufFile & file);

} // namespace dfl
