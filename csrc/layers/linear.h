// Products with weights, by our own kernels or by ggml's: norms and gates before them are part of
// the rows they read, and what is added to them is given with them.
#pragma once

#include "layers/cpu_ops/graph_context.h"

namespace dfl {

// rms(x) * weight. x: [n, ...]; weight: [n]. For a product, normed() costs less.
ggml_tensor * rms_norm(GraphContext & g, ggml_tensor * x, ggml_tensor * weight);

// y, or y + add where that is not NULL.
ggml_tensor * plus(GraphContext & g, ggml_tensor * y, ggml_tensor * add);

// weight: [n_in, n_out], x: [n_in, n_rows] -> [n_out, n_rows]. add: of that shape, or NULL.
ggml_tensor * linear(GraphContext & g, const Linear & l, const Rows & x,
                     ggml_tensor * add = nullptr);

// The same for several weights and one x. Where one node computes some of them, their rows do not
// follow each other without a gap.
std::vector<ggml_tensor *> linears(GraphContext & g, const std::vector<const Linear *> & weights,
                                   const Rows & x);

// act(gate) * up, of one shape.
ggml_tensor * gated(GraphContext & g, Activation activation, ggml_tensor * gate, ggml_tensor * up);
// The same, with gate and up as the halves of rows.
ggml_tensor * gated(GraphContext & g, Activation activation, ggml_tensor * both);

// x: [n_embd, n_rows] -> same: down(act(gate x) * up x) + add.
ggml_tensor * feed_forward(GraphContext & g, const FeedForwardWeights & w, Activation activation,
                           const Rows & x, ggml_tensor * add);

} // namespace dfl
