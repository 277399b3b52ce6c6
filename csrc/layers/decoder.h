// The one loop over layers: of every target, and of a drafter's block. What differs between layers
// is data, in LayerShape and LayerWeights; what a sublayer computes is given by the architecture.
#pragma once

#include "layers/cpu_ops/graph_context.h"

#include <functional>
#include <vector>

namespace dfl {

// What a sublayer is given.
struct SubLayerInput {
    Rows x;               // [n_embd, n_rows]: the residual stream, normed where the layer norms it
    ggml_tensor * stream; // the residual stream itself
    ggml_tensor * add;    // to be added to the result: the stream; NULL where a norm comes between
};

// x <- x + post_norm(build(norm(x))). Either norm may be missing in a layer's weights.
struct SubLayer {
    ggml_tensor * LayerWeights::* norm; // NULL: it reads the stream as it is
    ggml_tensor * LayerWeights::* post_norm;
    // -> [n_embd, n_rows], with what is to be added.
    std::function<ggml_tensor *(GraphContext & g, int il, const SubLayerInput & in)> build;
};

// The usual feed-forward, dense or of experts.
SubLayer feed_forward_sublayer();
// What mixes rows: attention, or a recurrent layer.
SubLayer mixer_sublayer(
    std::function<ggml_tensor *(GraphContext & g, int il, const SubLayerInput & in)> build);

// Picks the rows of x [n, n_rows] that get logits, which are all that a last layer computes behind
// its mixer; returns x where the last layer's output is tapped.
ggml_tensor * rows_with_logits(GraphContext & g, ggml_tensor * x);

// Layers of these sublayers over b.in.embd, final norm, head -> logits [n_vocab, n_out], or NULL
// when no row wants any. The first sublayer is the only one that lets rows see each other.
ggml_tensor * build_decoder(GraphContext & g, const std::vector<SubLayer> & sublayers,
                            const Linear & head);

} // namespace dfl
