// Gated DeltaNet in our own code, on the CPU: all but its products in two nodes a layer. A chain
// and a tree are scanned alike, so that a node of a tree has the bits of plain decoding.
#pragma once

#include "layers/cpu_ops/graph_context.h"

namespace dfl {

// Whether there is code for this CPU and shape.
bool can_scan_delta_net(const RecurrentShape & shape);

// The products of a layer's input [n_embd, n_rows].
struct DeltaNetProducts {
    ggml_tensor * qkv;   // [conv_channels, n_rows]
    ggml_tensor * gate;  // [d_state * n_v_heads, n_rows]
    ggml_tensor * beta;  // [n_v_heads, n_rows], or both, [2 * n_v_heads, n_rows]
    ggml_tensor * alpha; // the same
};

// What the output matrix takes, [d_state * n_v_heads, n_rows], for the rows
// RecurrentCache::pass_rows; otherwise as delta_net().
ggml_tensor * scan_delta_net(GraphContext & g, int il, const DeltaNetProducts & in);

// Advances the states of a device's recurrent layers along RecurrentCache::accepted.
void scan_promote(GraphContext & g, const RecurrentPart & part);

} // namespace dfl
