// A made-up architecture with features that no supported one combines: per-layer windows with their
// own head size and rope; rope factors; sinks; normed values taken from keys; norms after
// sublayers; GELU; scales of embeddings, layers and logits; a logit soft cap.
#include "arch/arch.h"
#include "gguf_schema.h"

namespace dfl {

static Hparams read(const GgufFile & file) {
    HparamRules rules;
    rules.rope_type = GGML_ROPE_TYPE_NEOX;
    rules.sliding_period = 3; // two of three layers have a window
    Hparams hp = read_common_hparams(file, rules);
    read_scales(file, hp);
    for (LayerShape & layer : hp.layers) {
        layer.rope.takes_factors = layer.window == 0;
        layer.value_is_key = layer.norms_values = true;
        layer.activation = Activation::GELU;
    }
    return hp;
}

static void bind(WeightLoader & loader) {
    BlockOptions options;
    options.head_norms = options.sinks = options.output_scale = true;
    options.post_attn_norm = options.post_ffn_norm = true;
    bind_decoder(loader, options);
}

extern const Arch TOY = {"toy", read, bind, build_attention_decoder};

} // namespace dfl
