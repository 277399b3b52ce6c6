// Gated DeltaNet: the linear attention of Qwen3.5.
#pragma once

#include "layers/cpu_ops/graph_context.h"

namespace dfl {

// x: [n_embd, n_rows] -> same, plus `add` if that is not NULL. Reads the committed state and
// convolution inputs of the batch's sequences and writes them back advanced by their rows; those of
// a verify are written to the updates instead. Source: reference forward of transformers'
// Qwen3_5GatedDeltaNet, with value heads in tiled order.
ggml_tensor * delta_net(GraphContext & g, int il, const Rows & x, ggml_tensor * add);

// Advances the committed states of a device's recurrent layers along accepted paths: of the lanes
// of shape.recurrent, n_rows steps each.
void promote(GraphContext & g, const RecurrentPart & part, const PromoteInputs & in);

// At least the graph nodes, views included, of a layer's lanes by the fused operation (observed:
// 40).
constexpr size_t RECURRENT_BATCH_NODES = 64;
// Rows of one chunk where an APPEND takes the form for trees.
constexpr int64_t TREE_FORM_CHUNK = 64;

} // namespace dfl
