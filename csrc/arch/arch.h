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

// Binds the tensors of a decoder without norms behind its sublayers. bind_mixer: binds a layer's
// attention or recurrent part; ffn_norm: name of the norm before the feed-forward.
void bind_decoder(WeightLoader & loader, void (*bind_mixer)(WeightLoader & loader, int il),
                  const char * ffn_norm);
// Binds a layer's attention, and norms of its heads.
void bind_attention(WeightLoader & loader, int il);
void bind_head_norms(WeightLoader & loader, int il);
// Builds a decoder of attention and feed-forwards.
ggml_tensor * build_attention_decoder(GraphContext & g);

} // namespace dfl
