// gpt-oss: windows in every other layer, sinks, biases, and experts throughout.
#include "arch/arch.h"
#include "gguf_schema.h"
#include "layers/attention.h"

namespace dfl {

static Hparams read(const GgufFile & file) {
    HparamRules rules;
    rules.rope_type = GGML_ROPE_TYPE_NEOX;
    rules.sliding_period = 2; // even layers slide
    rules.truncates_yarn = false;
    Hparams hp = read_common_hparams(file, rules);
    hp.experts = read_expert_shape(file, /*shared =*/false);
    hp.experts.activation = Activation::CLAMPED_SILU;
    return hp;
}

static void bind(WeightLoader & loader) {
    const Hparams & hp = loader.hparams();
    loader.shared_tensors();
    for (int il = 0; il < hp.n_layer(); ++il) {
        const LayerShape & shape = hp.layers[il];
        LayerWeights & layer = loader.weights().layers[il];
        layer.attn_norm = loader.vector(schema::TENSOR_ATTN_NORM, il, hp.n_embd);
        loader.attention(il, shape.head_dim * shape.n_head);
        layer.attn.sinks = loader.vector(schema::TENSOR_ATTN_SINKS, il, shape.n_head);
        layer.ffn_norm = loader.vector(schema::TENSOR_POST_ATTENTION_NORM, il, hp.n_embd);
        loader.experts(il);
    }
}

static ggml_tensor * build(GraphContext & g) {
    return build_decoder(g, {mixer_sublayer(self_attention), feed_forward_sublayer()},
                         g.weights.output);
}

extern const Arch GPT_OSS = {schema::ARCH_GPT_OSS, read, bind, build};

} // namespace dfl
