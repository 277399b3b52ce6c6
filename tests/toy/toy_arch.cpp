// A made-up architecture of what no shipped one has yet: windows of some layers, which have a head
// size and a rope of their own, rope factors of the others; sinks; values that are normed, and made
// of the keys; norms behind the sublayers; GELU; scales of embeddings, layers and logits; a
// softcap.
#include "arch/arch.h"
#include "gguf_schema.h"
#include "layers/attention.h"

namespace dfl {

static Hparams read(const GgufFile & file) {
    HparamRules rules;
    rules.rope_type = GGML_ROPE_TYPE_NEOX;
    rules.sliding_period = 3; // two layers slide, the third does not
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
    const Hparams & hp = loader.hparams();
    loader.shared_tensors();
    for (int il = 0; il < hp.n_layer(); ++il) {
        const LayerShape & shape = hp.layers[il];
        LayerWeights & layer = loader.weights().layers[il];
        layer.attn_norm = loader.vector(schema::TENSOR_ATTN_NORM, il, hp.n_embd);
        loader.attention(il, shape.head_dim * shape.n_head);
        layer.attn.q_norm = loader.vector(schema::TENSOR_ATTN_Q_NORM, il, shape.head_dim);
        layer.attn.k_norm = loader.vector(schema::TENSOR_ATTN_K_NORM, il, shape.head_dim);
        layer.attn.sinks = loader.vector(schema::TENSOR_ATTN_SINKS, il, shape.n_head);
        layer.post_attn_norm = loader.vector(schema::TENSOR_POST_ATTENTION_NORM, il, hp.n_embd);
        layer.ffn_norm = loader.vector(schema::TENSOR_FFN_NORM, il, hp.n_embd);
        loader.feed_forward(il);
        layer.post_ffn_norm = loader.vector(schema::TENSOR_POST_FFW_NORM, il, hp.n_embd);
        layer.output_scale = loader.vector(schema::TENSOR_LAYER_OUTPUT_SCALE, il, 1);
    }
}

static ggml_tensor * build(GraphContext & g) {
    return build_decoder(g, {mixer_sublayer(self_attention), feed_forward_sublayer()},
                         g.weights.output);
}

extern const Arch TOY = {"toy", read, bind, build};

} // namespace dfl
