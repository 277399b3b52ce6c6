// Qwen3, dense and with experts: as Llama, with normed heads and rope on halves.
#include "arch/arch.h"
#include "gguf_schema.h"
#include "layers/attention.h"

namespace dfl {

static Hparams read(const GgufFile & file) {
    return read_common_hparams(file, {GGML_ROPE_TYPE_NEOX});
}

static Hparams read_moe(const GgufFile & file) {
    Hparams hp = read(file);
    hp.experts = read_expert_shape(file, /*shared =*/false);
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
        layer.ffn_norm = loader.vector(schema::TENSOR_FFN_NORM, il, hp.n_embd);
        if (hp.experts.n_expert > 0) {
            loader.experts(il);
        } else {
            loader.feed_forward(il);
        }
    }
}

static ggml_tensor * build(GraphContext & g) {
    return build_decoder(g, {mixer_sublayer(self_attention), feed_forward_sublayer()},
                         g.weights.output);
}

extern const Arch QWEN3 = {schema::ARCH_QWEN3, read, bind, build};
extern const Arch QWEN3MOE = {schema::ARCH_QWEN3MOE, read_moe, bind, build};

} // namespace dfl
