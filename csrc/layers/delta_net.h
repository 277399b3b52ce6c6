// Gated DeltaNet: the linear attention of Qwen3.5 and Qwen3-Next.
#pragma once

#include "layers/cpu_ops/graph_context.h"

namespace dfl {

// Returns the layer's output for x [n_embd, n_rows], plus `add` if not NULL. Appended rows advance
// their sequences' states and convolution inputs; rows of a verify write node updates instead.
// Source: reference forward of transformers' Qwen3_5GatedDeltaNet, with value heads in tiled order.
ggml_tensor * delta_net(GraphContext & g, int il, const Rows & x, ggml_tensor * add);

// Advances one device's states along accepted paths, padded to shape.recurrent[0].n_rows nodes.
void promote(GraphContext & g, const RecurrentPart & part, const PromoteInputs & in);

// Upper bound of the graph nodes, with views, that one layer adds for a recurrent batch that ggml
// computes by its fused delta-net operation (observed: 40).
constexpr size_t RECURRENT_BATCH_NODES = 64;
// Rows of one chunk when appended rows are computed in tree form.
constexpr int64_t TREE_FORM_CHUNK = 64;

} // namespace dfl
