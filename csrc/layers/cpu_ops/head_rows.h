// Norm, rope and K/V cache writes of attention heads as one node, by our own CPU code.
#pragma once

#include "layers/cpu_ops/graph_context.h"

namespace dfl {

// Rotates x [head_dim, n_heads, n_rows] by positions, i32 [n_rows] or (M-RoPE) [4 * n_rows].
ggml_tensor * rope(GraphContext & g, int il, ggml_tensor * x, ggml_tensor * positions);

// Projected query, key and value heads of a layer. Rows may have gaps between them.
struct HeadRows {
    ggml_tensor * q; // queries [head_dim, n_head, n_rows]; NULL: only K and V are stored
    ggml_tensor * k; // keys [head_dim, n_head_kv, n_rows]; NULL: no key or value is stored
    ggml_tensor * v;
    ggml_tensor * q_norm; // weight of the query norm [head_dim], or NULL
    ggml_tensor * k_norm;
    ggml_tensor * positions;
    ggml_tensor * cells; // cells that keys and values are stored in, i64 [n_rows]
};

// True if the values of layer il get a norm (RMS, without a weight).
bool norms_values(const GraphContext & g, int il);

// Norms and rotates q and k, stores k and v. Returns q, f32 [head_dim, n_head, n_rows], or NULL.
// Layer il must attend on the host. If cached K is Hadamard-rotated, so is q.
ggml_tensor * rotate_heads(GraphContext & g, int il, const HeadRows & rows);

} // namespace dfl
