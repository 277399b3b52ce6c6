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
              "%s: this is the vision part of a model (architecture \"%s\"); give the file of the "
              "text part",
              file.path().c_str(), file.arch().c_str());
    throw Error(DFL_STATUS_UNSUPPORTED,
                format("%s: architecture \"%s\" cannot be run as a target; supported: %s",
                       file.path().c_str(), file.arch().c_str(), names.c_str()));
}

static void bind_attention(WeightLoader & loader, int il) {
    const LayerShape & shape = loader.hparams().layers[il];
    loader.attention(il, shape.head_dim * shape.n_head);
}

static void bind_feed_forward(WeightLoader & loader, int il) {
    if (loader.hparams().experts.n_expert > 0) {
        loader.experts(il);
    } else {
        loader.feed_forward(il);
    }
}

void bind_transformer_block(WeightLoader & loader, int il, const BlockOptions & options) {
    const int64_t n_embd = loader.hparams().n_embd;
    const LayerShape & shape = loader.hparams().layers[il];
    LayerWeights & layer = loader.weights().layers[il];
    const auto vector_if = [&](bool has, const char * name, int64_t n) {
        return has ? loader.vector(name, il, n) : nullptr;
    };
    layer.attn_norm = loader.vector(schema::TENSOR_ATTN_NORM, il, n_embd);
    (options.bind_mixer != nullptr ? options.bind_mixer : bind_attention)(loader, il);
    if (options.head_norms && !shape.recurrent) {
        layer.attn.q_norm = loader.vector(schema::TENSOR_ATTN_Q_NORM, il, shape.head_dim);
        layer.attn.k_norm = loader.vector(schema::TENSOR_ATTN_K_NORM, il, shape.head_dim);
    }
    if (options.sinks) {
        layer.attn.sinks = loader.vector(schema::TENSOR_ATTN_SINKS, il, shape.n_head);
    }
    layer.post_attn_norm =
        vector_if(options.post_attn_norm, schema::TENSOR_POST_ATTENTION_NORM, n_embd);
    layer.ffn_norm = loader.vector(
        options.ffn_norm != nullptr ? options.ffn_norm : schema::TENSOR_FFN_NORM, il, n_embd);
    (options.bind_feed_forward != nullptr ? options.bind_feed_forward : bind_feed_forward)(loader,
                                                                                           il);
    layer.post_ffn_norm = vector_if(options.post_ffn_norm, schema::TENSOR_POST_FFW_NORM, n_embd);
    layer.output_scale = vector_if(options.output_scale, schema::TENSOR_LAYER_OUTPUT_SCALE, 1);
}

void bind_decoder(WeightLoader & loader, const BlockOptions & options) {
    loader.shared_tensors();
    for (int il = 0; il < loader.hparams().n_layer(); ++il) {
        bind_transformer_block(loader, il, options);
    }
}

ggml_tensor * build_attention_decoder(GraphContext & g) {
    return build_decoder(g, {mixer_sublayer(self_attention), feed_forward_sublayer()},
                         g.weights.output);
}

} // namespace dfl
