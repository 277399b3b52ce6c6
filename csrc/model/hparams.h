// What a model file says about its shapes. A layer's shape is data: attention, cells and the memory
// plan read only this, never the architecture's name.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace dfl {

class GgufFile;

struct RopeShape {
    int type = 0; // ggml rope mode
    int n_dims = 0;
    int sections[4] = {0, 0, 0, 0};
    int n_ctx_orig = 0;
    float freq_base = 10000.0f;
    float freq_scale = 1.0f;
    float ext_factor = 0.0f;
    float attn_factor = 1.0f;
    float beta_fast = 32.0f;   // YaRN: rotations in n_ctx_orig above which a pair is left alone,
    float beta_slow = 1.0f;    // and below which it is interpolated in full
    bool takes_factors = true; // those of rope_freqs.weight, where the file has it
    std::vector<float> factors = {}; // [n_dims / 2] of its own, in place of YaRN with a ramp

    // Position ids a row needs: M-RoPE takes time, height, width and a fourth.
    int64_t n_position_ids() const;
    bool operator==(const RopeShape & o) const;
};

// Function of a gate, before the product with its other factor.
enum class Activation {
    SILU,
    GELU,         // the tanh form
    CLAMPED_SILU, // of gpt-oss: g sigmoid(1.702 g) (u + 1), g up to 7, u within 7
};

// Of CLAMPED_SILU.
constexpr float GATE_SHARPNESS = 1.702f, GATE_LIMIT = 7.0f;

struct LayerShape {
    bool recurrent = false;
    int64_t n_head = 0;
    int64_t n_head_kv = 0;
    int64_t head_dim = 0;
    int64_t window = 0;        // keys a row may see, itself included; 0: all
    bool causal = true;        // false: a row also sees what comes after it
    bool value_is_key = false; // V may be the weightless norm of the raw K projection
    bool norms_values = false; // V is normed without a weight, whatever projects it
    int64_t kv_layer = -1;     // whose keys and values it reads; -1: its own
    float attn_scale = 0.0f;
    RopeShape rope;
    int64_t n_ff = 0;
    Activation activation = Activation::SILU;
};

struct RecurrentShape {
    int64_t d_conv = 0;  // convolution taps
    int64_t d_state = 0; // key and value head size
    int64_t n_k_heads = 0;
    int64_t n_v_heads = 0;
    bool grouped = false; // value heads of a key head are neighbours; else each n_k_heads-th is its

    int64_t values_a_key() const { return n_v_heads / n_k_heads; }
    // A value head's key head, and which of that one's it is; and back.
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
    // What promoting a node needs: k, v, g and beta.
    int64_t node_update_size() const { return d_state * (n_k_heads + n_v_heads) + 2 * n_v_heads; }
    int64_t state_size() const { return d_state * d_state * n_v_heads; }
};

struct ExpertShape {
    int64_t n_expert = 0;
    int64_t n_used = 0;
    int64_t n_ff = 0;
    int64_t n_ff_shared = 0;
    Activation activation = Activation::SILU; // of the shared expert, too
};

struct Hparams {
    int64_t n_vocab = 0;
    int64_t n_embd = 0;
    int64_t n_ctx_train = 0;
    float eps = 0.0f;
    std::vector<LayerShape> layers; // executed layers only: no MTP blocks
    RecurrentShape recurrent;
    ExpertShape experts;
    int64_t n_per_layer = 0; // width of what every layer takes of a token besides; 0: nothing
    float embedding_scale = 1.0f;
    float value_scale = 1.0f; // of what attention adds to the residual stream
    float logit_scale = 1.0f;
    float logit_softcap = 0.0f; // logits become softcap * tanh(logits / softcap); 0: none

    int64_t n_layer() const { return static_cast<int64_t>(layers.size()); }
    int64_t n_recurrent() const;
};

// Rules of an architecture, for read_common_hparams: no metadata key has them.
struct HparamRules {
    int rope_type = 0;                      // a ggml rope mode
    std::optional<double> default_eps = {}; // for files that may leave it out
    // That some layers may slide. Where a file with a window does not say which, all but every n-th
    // do; 0: it has to say. Empty: a window in the file is refused.
    std::optional<int64_t> sliding_period = {};
    bool truncates_yarn = true; // whether the bounds of its ramp are whole, unless the file says
};

// Everything the decoder architectures have in common: sizes, heads, rope, windows, feed-forward
// widths. Sliding layers have a head size and a rope of their own where the file gives them any.
// n_vocab is left to read_vocab_size.
Hparams read_common_hparams(const GgufFile & file, const HparamRules & rules);

// Reads the rope sections of a file that has them into all layers. Throws if their sum is 0 or
// exceeds the rotated dimensions, on which ggml aborts.
void read_rope_sections(const GgufFile & file, Hparams & hp);

// The factors of embeddings, attention outputs and logits, and the softcap; those that the file
// does not give stay as they are. Architectures that do not call it refuse files with any.
void read_scales(const GgufFile & file, Hparams & hp);

// Rows of the token embeddings; throws unless the tokenizer has as many tokens.
int64_t read_vocab_size(const GgufFile & file);

// The expert keys of a mixture-of-experts model; shared: it also has a shared expert.
ExpertShape read_expert_shape(const GgufFile & file, bool shared);

// Call when the hyper-parameters have been read. Throws DFL_STATUS_UNSUPPORTED naming the first key
// of the file's architecture that nobody asked for, unless it or its value is known to change
// nothing.
void check_no_key_skipped(const GgufFile & file);

} // namespace dfl
