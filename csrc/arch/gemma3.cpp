// Gemma 3: 5 of 6 layers have a sliding window and a rope base of their own. Norms before and after
// attention and feed-forwards, and of each head's query and key.
#include "arch/arch.h"
#include "gguf_schema.h"

#include <cmath>

namespace dfl {

// Rope base of sliding layers if the file has none. Source: llama.cpp, src/models/gemma3.cpp.
static constexpr float SLIDING_FREQ_BASE = 10000.0f;
// Gemma 3 27B, known by its number of layers, divides attention scores by sqrt(n_embd / n_head).
static constexpr int64_t N_LAYERS_27B = 62;

static Hparams read(const GgufFile & file) {
    HparamRules rules;
    rules.rope_type = GGML_ROPE_TYPE_NEOX;
    rules.sliding_period = 6;
    Hparams hp = read_common_hparams(file, rules);
    hp.embedding_scale = std::sqrt(static_cast<float>(hp.n_embd));
    read_scales(file, hp);
    for (LayerShape & layer : hp.layers) {
        layer.activation = Activation::GELU;
        if (hp.n_layer() == N_LAYERS_27B && !file.has(schema::KEY_ATTENTION_SCALE)) {
            layer.attn_scale = 1.0f / std::sqrt(static_cast<float>(hp.n_embd / layer.n_head));
        }
        if (layer.window > 0) { // rope scaling applies only to layers without a window
            RopeShape plain;
            plain.type = layer.rope.type;
            plain.n_dims = layer.rope.n_dims;
            plain.n_ctx_orig = layer.rope.n_ctx_orig;
            plain.freq_base =
                file.has(schema::KEY_ROPE_FREQ_BASE_SWA) ? layer.rope.freq_base : SLIDING_FREQ_BASE;
            layer.rope = plain;
        }
    }
    return hp;
}

static void bind(WeightLoader & loader) {
    BlockOptions options;
    options.head_norms = options.post_attn_norm = options.post_ffn_norm = true;
    bind_decoder(loader, options);
}

extern const Arch GEMMA3 = {schema::ARCH_GEMMA3, read, bind, build_attention_decoder};

} // namespace dfl
