// Products with weights, by our own CPU kernels (which also norm, gate and add) or by ggml.
#pragma once

#include "layers/cpu_ops/graph_context.h"

namespace dfl {

// Returns the RMS norm of x [n, ...] times weight [n]. normed() is cheaper as input of a product.
ggml_tensor * rms_norm(GraphContext & g, ggml_tensor * x, ggml_tensor * weight);

// Returns y + add, or y if `add` is NULL.
ggml_tensor * plus(GraphContext & g, ggml_tensor * y, ggml_tensor * add);

// Returns (weight x) * scale + bias + add, [n_out, n_rows], for x [n_in, n_rows]; add may be NULL.
ggml_tensor * linear(GraphContext & g, const Linear & l, const Rows & x,
                     ggml_tensor * add = nullptr);

// Returns the products of several weights with one x. Rows of a product may have gaps between them.
std::vector<ggml_tensor *> linears(GraphContext & g, const std::vector<const Linear *> & weights,
                                   const Rows & x);

ggml_tensor * gated(GraphContext & g, Activation activation, ggml_tensor * gate, ggml_tensor * up);
// Returns act(gate) * up for rows that hold gate in the first half and up in the second.
ggml_tensor * gated(GraphContext & g, Activation activation, ggml_tensor * both);

// Returns down(act(gate x) * up x) + add for x [n_embd, n_rows]; `add` may be NULL.
ggml_tensor * feed_forward(GraphContext & g, const FeedForwardWeights & w, Activation activation,
                           const Rows & x, ggml_tensor * add);

} // namespace dfl
