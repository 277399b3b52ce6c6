#include "arch/arch.h"

#include "error.h"
#include "gguf_schema.h"
#include "layers/attention.h"

#include <string>

namespace dfl {

extern const Arch & find_arch(const GgufFile & file) {
    std::string names;
    for (const Arch * arch : architectures()) {
        if (file.arch() == arch->name) {
            return *arch;
        }
        names += (names.empty() ? "" : ", ") + std::string(arch->name);
    }
    DFL_CHECK(file.arch() != schema::ARCH_CLIP, DFL_STATUS_UNSUPPORTED,
              "%s: is the vision part of a model (architecture \"%s\"); the text part is needed",
              file.path().c_str(), file.arch().c_str());
    throw Error(DFL_STATUS_UNSUPPORTED,
                format("%s: architecture \"%s\" cannot be run as a target; supported: %s",
                       file.path().c_str(), file.arch().c_str(), names.c_str()));
}

void bind_decoder(WeightLoader & loader, void (*bind_mixer)(WeightLoader & loader, int il),
                  const char * ffn_norm) {
    const Hparams & hp = loader.hparams();
    loader.shared_tensors();
    for (int il = 0; il < hp.n_layer(); ++il) {
        LayerWeights & layer = loader.weights().layers[il];
        layer.attn_norm = loader.vector(schema::TENSOR_ATTN_NORM, il, hp.n_embd);
        bind_mixer(loader, il);
        layer.ffn_norm = loader.vector(ffn_norm, il, hp.n_embd);
        if (hp.experts.n_expert > 0) {
            loader.experts(il);
        } else {
            loader.feed_forward(il);
        }
    }
}

void bind_attention(WeightLoader & loader, int il) {
    const LayerShape & shape = loader.hparams().layers[il];
    loader.attention(il, shape.head_dim * shape.n_head);
}

void bind_head_norms(WeightLoader & loader, int il) {
    const int64_t head_dim = loader.hparams().layers[il].head_dim;
    AttentionWeights & attn = loader.weights().layers[il].attn;
    attn.q_norm = loader.vector(schema::TENSOR_ATTN_Q_NORM, il, head_dim);
    attn.k_norm = loader.vector(schema::TENSOR_ATTN_K_NORM, il, head_dim);
}

ggml_tensor * build_attention_decoder(GraphContext & g) {
    return build_decoder(g, {mixer_sublayer(self_attention), feed_forward_sublayer()},
                         g.weights.output);
}

} // namespace dfl
