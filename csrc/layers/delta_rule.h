// The gated delta rule over the nodes of a tree, by ggml's standard operations.
//
// G is the sum of the log decays g from the root to a node; j runs over the ancestors of node i:
//   o_i = exp(G_i) S q_i + sum_{j <= i} exp(G_i - G_j) (k_j q_i) beta_j w_j
//   w_i = v_i - exp(G_i) S k_i - sum_{j < i} exp(G_i - G_j) (k_j k_i) beta_j w_j
// The second line is a unit lower triangular system, as parents come before their children. Devices
// without ggml's fused operation compute chains in this form, too.
#pragma once

#include "layers/cpu_ops/graph_context.h"

namespace dfl {

// Inputs of the delta rule for n nodes a lane. qk: queries, then keys, [d, 2 * n, n_v_heads,
// lanes], contiguous. v: [d, n_v_heads, n, lanes]. g and beta: [n, 1, n_v_heads, lanes]. state: [d,
// d, n_v_heads, lanes].
struct DeltaRuleInputs {
    ggml_tensor * qk;
    ggml_tensor * v;
    ggml_tensor * g;
    ggml_tensor * beta;
    ggml_tensor * state;
};

// Outputs [d, n_v_heads, n, lanes], and the state after the last node if the nodes are a chain.
struct DeltaRule {
    ggml_tensor * out;
    ggml_tensor * state;
};

// Rows of the delta rule's triangular system that are solved at once.
constexpr int64_t SOLVE_BLOCK = 32;

// Returns an upper bound of the graph nodes for n rows of a layer (observed: 25, plus 60 for each
// chunk, plus 10 for each block of a chunk after the first).
constexpr size_t tree_form_nodes(int64_t n, int64_t chunk) {
    return 64 + (n + chunk - 1) / chunk * (96 + 16 * (chunk / SOLVE_BLOCK));
}

DeltaRule delta_rule(GraphContext & g, const DeltaRuleInputs & in);

// Returns rows [first, first + n) of normalised heads in the layout of DeltaRuleInputs::qk.
ggml_tensor * queries_keys(GraphContext & g, ggml_tensor * unit, int64_t first, int64_t n);
// Scales key heads to length 1 and query heads to length 1 / sqrt(d). qk: [d, 2 * n_k_heads, rows,
// lanes], any strides; the result is contiguous.
ggml_tensor * unit_queries_keys(GraphContext & g, ggml_tensor * qk);

} // namespace dfl
