// gpt-oss: windows in every other layer, attention sinks, biases, experts in all layers.
#include "arch/arch.h"
#include "gguf_schema.h"

namespace dfl {

static Hparams read(const GgufFile & file) {
    HparamRules rules;
    rules.rope_type = GGML_ROPE_TYPE_NEOX;
    rules.sliding_period = 2; // even layers have a window
    rules.truncates_yarn = false;
    Hparams hp = read_common_hparams(file, rules);
    hp.experts = read_expert_shape(file, /*shared =*/false);
    hp.experts.activation = Activation::CLAMPED_SILU;
    return hp;
}

static void bind(WeightLoader & loader) {
    BlockOptions options;
    options.sinks = true;
    options.ffn_norm = schema::TENSOR_POST_ATTENTION_NORM;
    bind_decoder(loader, options);
}

extern const Arch GPT_OSS = {schema::ARCH_GPT_OSS, read, bind, build_attention_decoder};

} // namespace dfl
