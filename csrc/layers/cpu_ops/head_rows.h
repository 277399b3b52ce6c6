// Heads of attention on their way from a product to cells and queries, in our own code: norm, rope
// and the writes to the cache as one node.
#pragma once

#include "layers/cpu_ops/graph_context.h"

namespace dfl {

// x: [head_dim, n_heads, n_rows] -> same, rotated by positions: i32 [n_rows], or [4 * n_rows].
// ggml's operation, whose variants our own code takes over.
ggml_tensor * rope(GraphContext & g, int il, ggml_tensor * x, ggml_tensor * positions);

// What a layer's rows are made of. Rows may be further apart than their width.
struct HeadRows {
    ggml_tensor * q;      // [head_dim, n_head, n_rows], or NULL: only K and V are stored
    ggml_tensor * k;      // [head_dim, n_head_kv, n_rows], or NULL: nothing is stored
    ggml_tensor * v;      // the same
    ggml_tensor * q_norm; // [head_dim], or NULL
    ggml_tensor * k_norm;
    ggml_tensor * positions; // i32 [n_rows], or [4 * n_rows]
    ggml_tensor * cells;     // i64 [n_rows]
};

// Whether a layer's values are normed, without a weight.
bool norms_values(const GraphContext & g, int il);

// Norms and rotates q and k, stores k and v -> f32 [head_dim, n_head, n_rows], or NULL without q.
// Of a layer that KvCache::attends_on_host(); where K is rotated, q is too.
ggml_tensor * rotate_heads(GraphContext & g, int il, const HeadRows & rows);

} // namespace dfl
