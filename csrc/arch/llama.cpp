// Llama and its kin (SmolLM2): rope on neighbouring pairs, no head norms.
#include "arch/arch.h"
#include "gguf_schema.h"
#include "layers/attention.h"

namespace dfl {

static Hparams read(const GgufFile & file) {
    return read_common_hparams(file, {GGML_ROPE_TYPE_NORMAL});
}

static void bind(WeightLoader & loader) {
    const Hparams & hp = loader.hparams();
    loader.shared_tensors();
    for (int il = 0; il < hp.n_layer(); ++il) {
        LayerWeights & layer = loader.weights().layers[il];
        layer.attn_norm = loader.vector(schema::TENSOR_ATTN_NORM, il, hp.n_embd);
        loader.attention(il, hp.layers[il].head_dim * hp.layers[il].n_head);
        layer.ffn_norm = loader.vector(schema::TENSOR_FFN_NORM, il, hp.n_embd);
        loader.feed_forward(il);
    }
}

static ggml_tensor * build(GraphContext & g) {
    return build_decoder(g, {mixer_sublayer(self_attention), feed_forward_sublayer()},
                         g.weights.output);
}

extern const Arch LLAMA = {schema::ARCH_LLAMA, read, bind, build};

} // namespace dfl
