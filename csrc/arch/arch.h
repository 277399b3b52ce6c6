// The interface of an architecture. A new architecture needs a file and a row in table.cpp.
#pragma once

#include "layers/cpu_ops/graph_context.h"
#include "model/weights.h"

#include <vector>

namespace dfl {

struct Arch {
    const char * name; // name: value of general.architecture in GGUF files.
    // read(): returns the hyper-parameters. Throws DFL_STATUS_FILE naming a wrong metadata key.
    Hparams (*read)(const GgufFile & file);
    // Declares every tensor that the architecture needs from the file.
    void (*bind)(WeightLoader & loader);
    // Builds the graph of a pass. Returns logits [n_vocab, n_out] of its output rows; NULL if none.
    ggml_tensor * (*build)(GraphContext & g);
};

// Returns every architecture that can be a target.
const std::vector<const Arch *> & architectures();

// Returns the file's architecture. Throws DFL_STATUS_UNSUPPORTED with a list of supported names.
const Arch & find_arch(const GgufFile & file);

// Optional tensors of a transformer layer. head_norms: norms of each head's query and key.
// post_attn_norm, post_ffn_norm: norms of the outputs of attention and of the feed-forward.
struct BlockOptions {
    bool head_norms = false, sinks = false;
    bool post_attn_norm = false, post_ffn_norm = false;
    bool output_scale = false;
    const char * ffn_norm = nullptr; // tensor of the feed-forward norm; NULL: TENSOR_FFN_NORM.
    // bind_mixer declares a layer's weights of attention or recurrence (NULL: attention),
    // bind_feed_forward those of its feed-forward (NULL: experts if the model has any, else dense).
    void (*bind_mixer)(WeightLoader & loader, int il) = nullptr;
    void (*bind_feed_forward)(WeightLoader & loader, int il) = nullptr;
};

void bind_transformer_block(WeightLoader & loader, int il, const BlockOptions & options);
void bind_decoder(WeightLoader & loader, const BlockOptions & options);
// Builds a decoder whose layers have attention and a feed-forward.
ggml_tensor * build_attention_decoder(GraphContext & g);

} // namespace dfl
