// The loop over the layers of targets and drafters. Architectures supply the sublayers of a layer.
#pragma once

#include "layers/cpu_ops/graph_context.h"

#include <functional>
#include <vector>

namespace dfl {

struct SubLayerInput {
    Rows x; // input of a sublayer [n_embd, n_rows]: residual stream, normed if it has a norm
    ggml_tensor * stream; // residual stream [n_embd, n_rows], not normed
    ggml_tensor * add; // residual stream that build() adds to its result; NULL before a post-norm
};

// Step of a layer: x <- x + post_norm(build(norm(x))). A layer may lack either norm.
struct SubLayer {
    ggml_tensor * LayerWeights::* norm; // NULL: build() reads the residual stream without a norm
    ggml_tensor * LayerWeights::* post_norm;
    // Returns the sublayer's output [n_embd, n_rows] plus SubLayerInput::add.
    std::function<ggml_tensor *(GraphContext & g, int il, const SubLayerInput & in)> build;
};

// Returns the usual feed-forward sublayer: dense, or a mixture of experts.
SubLayer feed_forward_sublayer();
// Returns the sublayer that mixes rows. build: adds attention or a recurrent layer.
SubLayer mixer_sublayer(
    std::function<ggml_tensor *(GraphContext & g, int il, const SubLayerInput & in)> build);

// Selects the rows of x [n, n_rows] that get logits: the last layer computes no other rows after
// its mixer. Returns all rows if a drafter reads the last layer's output.
ggml_tensor * rows_with_logits(GraphContext & g, ggml_tensor * x);

// Builds all layers over g.in.embd, the final norm and the head. Returns logits [n_vocab, n_out],
// or NULL if no row gets logits. Rows may see each other in the first sublayer only.
ggml_tensor * build_decoder(GraphContext & g, const std::vector<SubLayer> & sublayers,
                            const Linear & head);

} // namespace dfl
