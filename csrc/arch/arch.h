// The interface of an architecture and the table of them. Adding one: a file and a row in
// table.cpp.
#pragma once

#include "layers/cpu_ops/graph_context.h"
#include "model/weights.h"

#include <vector>

namespace dfl {

struct Arch {
    const char * name; // general.architecture
    // Reads the metadata; throws DFL_STATUS_FILE naming the key.
    Hparams (*read)(const GgufFile & file);
    // Declares every tensor of the file it needs.
    void (*bind)(WeightLoader & loader);
    // Builds the forward pass of b.shape.n_rows rows; returns logits [n_vocab, n_out] or NULL.
    ggml_tensor * (*build)(GraphContext & g);
};

// Every architecture that can be a target.
const std::vector<const Arch *> & architectures();

// Throws DFL_STATUS_UNSUPPORTED listing what is known.
const Arch & find_arch(const GgufFile & file);

// Optional tensors of a layer. head_norms: norms of queries and keys, if the layer attends.
// post_attn_norm, post_ffn_norm: norms behind the sublayers.
struct BlockOptions {
    bool head_norms = false, sinks = false;
    bool post_attn_norm = false, post_ffn_norm = false;
    bool output_scale = false;
    const char * ffn_norm = nullptr; // name of the norm before the feed-forward; NULL: the usual
    void (*bind_mixer)(WeightLoader & loader, int il) = nullptr; // NULL: attention
    // NULL: experts where the model has any, else a dense feed-forward.
    void (*bind_feed_forward)(WeightLoader & loader, int il) = nullptr;
};

void bind_transformer_block(WeightLoader & loader, int il, const BlockOptions & options);
// Binds embeddings, head and all layers.
void bind_decoder(WeightLoader & loader, const BlockOptions & options);
// Builds a decoder of attention and feed-forwards.
ggml_tensor * build_attention_decoder(GraphContext & g);

} // namespace dfl
