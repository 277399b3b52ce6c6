// Gated DeltaNet by our own CPU code: two nodes a layer besides the products. Chains and trees use
// the same scan, so that a tree node has the same bits as in plain decoding.
#pragma once

#include "layers/cpu_ops/graph_context.h"

namespace dfl {

// True if our CPU kernels support this shape.
bool can_scan_delta_net(const RecurrentShape & shape);

// Projections of a layer's input [n_embd, n_rows].
struct DeltaNetProducts {
    ggml_tensor * qkv;   // inputs of the convolution [conv_channels, n_rows]
    ggml_tensor * gate;  // output gate [d_state * n_v_heads, n_rows]
    ggml_tensor * beta;  // product for beta [n_v_heads, n_rows], or beta and alpha side by side
    ggml_tensor * alpha; // product for the decay [n_v_heads, n_rows], or the same tensor as beta
};

// Returns the input of delta_net()'s output projection, [d_state * n_v_heads, n_rows], for the rows
// that RecurrentCache::pass_rows holds at run time.
ggml_tensor * scan_delta_net(GraphContext & g, int il, const DeltaNetProducts & in);

// Advances the states of one device's recurrent layers along the paths RecurrentCache::accepted.
void scan_promote(GraphContext & g, const RecurrentPart & part);

} // namespace dfl
