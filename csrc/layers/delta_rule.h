// The gated delta rule over the nodes of a tree, in stock operations.
//
// With G the sum of the log decays g from the root to a node, j running over a node i's ancestors:
//   o_i = exp(G_i) S q_i + sum_{j <= i} exp(G_i - G_j) (k_j q_i) beta_j w_j
//   w_i = v_i - exp(G_i) S k_i - sum_{j < i} exp(G_i - G_j) (k_j k_i) beta_j w_j
// The second line is a unit lower triangular system, as parents come before their children. A
// chain is a tree, so this is also the form for a device that lacks ggml's fused operation.
#pragma once

#include "layers/cpu_ops/graph_context.h"

namespace dfl {

// Nodes of some lanes in one layer, n of each.
struct DeltaRuleInputs {
    ggml_tensor * qk;    // [d, 2 * n, n_v_heads, lanes], contiguous: all queries, then all keys
    ggml_tensor * v;     // [d, n_v_heads, n, lanes]
    ggml_tensor * g;     // [n, 1, n_v_heads, lanes]
    ggml_tensor * beta;  // [n, 1, n_v_heads, lanes]
    ggml_tensor * state; // [d, d, n_v_heads, lanes]
};

struct DeltaRule {
    ggml_tensor * out;   // [d, n_v_heads, n, lanes]
    ggml_tensor * state; // as it was, after the last node, where all others are its ancestors
};

// Rows of its triangular system that are solved at once.
constexpr int64_t SOLVE_BLOCK = 32;

// At least the graph nodes, views included, of n rows of a layer in chunks (observed: 60 a chunk
// and 10 a further block, and 25 of a layer).
constexpr size_t tree_form_nodes(int64_t n, int64_t chunk) {
    return 64 + (n + chunk - 1) / chunk * (96 + 16 * (chunk / SOLVE_BLOCK));
}

DeltaRule delta_rule(GraphContext & g, const DeltaRuleInputs & in);

// Rows [first, first + n) of queries and keys [d, 2 * n_k_heads, rows, lanes] as DeltaRuleInputs
// wants them.
ggml_tensor * queries_keys(GraphContext & g, ggml_tensor * unit, int64_t first, int64_t n);
// What these are made of: queries and keys [d, 2 * n_k_heads, rows, lanes] (any strides) made
// contiguous and of length 1, queries of 1 / sqrt(d).
ggml_tensor * unit_queries_keys(GraphContext & g, ggml_tensor * qk);

} // namespace dfl
