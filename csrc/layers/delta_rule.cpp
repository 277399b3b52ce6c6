#include "layers/delta_rule.h"

#include <algorithm>

namespace dfl {

// Returns the ancestor masks for n nodes in each of n_lanes lanes, created once per graph.
static TreeMasks & masks_of(GraphContext & g, int64_t n, int64_t n_lanes) {
    const bool is_tree = !g.shape.recurrent.empty() && g.shape.recurrent[g.batch_index].is_verify;
    const auto fits = [&](const TreeInputs & in) {
        return in.n == n && (is_tree ? in.batch == g.batch_index : in.batch < 0);
    };
    for (TreeMasks & masks : g.tree_masks) {
        if (fits(masks.in) && masks.n_lanes == n_lanes) {
            return masks;
        }
    }
    for (const TreeInputs & in : g.in.trees) {
        if (fits(in)) {
            const int64_t heads = g.hp.recurrent.n_v_heads;
            auto each_head = [&](ggml_tensor * x) {
                return ggml_repeat_4d(g.ctx, x, x->ne[0], x->ne[1], heads, n_lanes);
            };
            g.tree_masks.push_back({in, n_lanes, each_head(in.ancestors), each_head(in.bias), {}});
        }
    }
    return g.tree_masks.back();
}

// Views n entries of x [n0, n1, n2, n3] from `first` on: columns() along n0, rows() along n1.
static ggml_tensor * columns(GraphContext & g, ggml_tensor * x, int64_t first, int64_t n) {
    return ggml_view_4d(g.ctx, x, n, x->ne[1], x->ne[2], x->ne[3], x->nb[1], x->nb[2], x->nb[3],
                        first * x->nb[0]);
}
static ggml_tensor * rows(GraphContext & g, ggml_tensor * x, int64_t first, int64_t n) {
    return ggml_view_4d(g.ctx, x, x->ne[0], n, x->ne[2], x->ne[3], x->nb[1], x->nb[2], x->nb[3],
                        first * x->nb[1]);
}

ggml_tensor * unit_queries_keys(GraphContext & g, ggml_tensor * qk) {
    return ggml_mul(g.ctx, ggml_rms_norm(g.ctx, qk, g.hp.eps / qk->ne[0]), g.in.unit);
}

ggml_tensor * queries_keys(GraphContext & g, ggml_tensor * unit, int64_t first, int64_t n) {
    const RecurrentShape & shape = g.hp.recurrent;
    const int64_t n_k = shape.n_k_heads, d = unit->ne[0], lanes = unit->ne[3];
    auto half = [&](int64_t head) {
        ggml_tensor * heads = ggml_view_4d(g.ctx, unit, d, n_k, n, lanes, unit->nb[1], unit->nb[2],
                                           unit->nb[3], first * unit->nb[2] + head * unit->nb[1]);
        return ggml_permute(g.ctx, heads, 0, 2, 1, 3);
    };
    ggml_tensor * qk = ggml_concat(g.ctx, half(0), half(n_k), 1);
    // Value head h goes with key head h % n_k.
    return n_k == shape.n_v_heads ? qk
                                  : ggml_repeat_4d(g.ctx, qk, d, 2 * n, shape.n_v_heads, lanes);
}

// Returns exp(G_i - G_j) beta_j for each node i and ancestor j, else 0: [n (j), 2n (i), n_v,
// lanes]. G_i: sum of log decays from the root to node i. Only the n rows for queries include j =
// i. Sets growth to exp(G_i), [2n, 1, n_v, lanes].
static ggml_tensor * decays(GraphContext & g, const DeltaRuleInputs & in, const TreeMasks & masks,
                            ggml_tensor ** growth) {
    ggml_context * c = g.ctx;
    const int64_t n = masks.in.n, n_v = in.g->ne[2], lanes = in.g->ne[3];
    // Elementwise sums along paths: matrix products of some devices keep only 10 bits of a factor.
    ggml_tensor * sums = ggml_sum_rows(c, ggml_mul(c, masks.ancestors, in.g));
    *growth = ggml_reshape_4d(c, ggml_exp(c, sums), 2 * n, 1, n_v, lanes);
    ggml_tensor * at_j =
        ggml_view_4d(c, sums, n, 1, n_v, lanes, sums->nb[2], sums->nb[2], sums->nb[3], 0);
    ggml_tensor * d = ggml_exp(c, ggml_sub(c, ggml_add(c, masks.bias, sums), at_j));
    return ggml_mul(c, d, in.beta);
}

// Returns identity matrices [n, n, n_v, lanes], created once per graph and n.
static ggml_tensor * identity(GraphContext & g, TreeMasks & masks, int64_t n) {
    for (ggml_tensor * made : masks.identities) {
        if (made->ne[0] == n) {
            return made;
        }
    }
    ggml_tensor * corner = columns(g, rows(g, masks.in.identity, 0, n), 0, n);
    const int64_t heads = g.hp.recurrent.n_v_heads;
    masks.identities.push_back(ggml_repeat_4d(g.ctx, corner, n, n, heads, masks.n_lanes));
    return masks.identities.back();
}

// Solves (I + a) w = r. a: strictly lower triangular, [n (j), n (i), n_v, lanes]; r: [n, d, n_v,
// lanes]. Solves block by block, because the time of one solve grows with n^3.
static ggml_tensor * solve(GraphContext & g, ggml_tensor * a, ggml_tensor * r, TreeMasks & masks) {
    ggml_context * c = g.ctx;
    ggml_tensor * w = nullptr;
    for (int64_t first = 0; first < a->ne[0]; first += SOLVE_BLOCK) {
        const int64_t n = std::min(SOLVE_BLOCK, a->ne[0] - first);
        ggml_tensor * below = rows(g, a, first, n);
        ggml_tensor * residual = columns(g, r, first, n);
        // ggml's Vulkan backend rounds float32 factors with non-contiguous rows to half precision.
        if (first > 0) {
            ggml_tensor * solved = ggml_cont(c, columns(g, below, 0, first));
            residual = ggml_sub(c, residual, ggml_mul_mat(c, solved, w));
        } else if (n < a->ne[0]) {
            residual = ggml_cont(c, residual);
        }
        ggml_tensor * eye = identity(g, masks, n);
        ggml_tensor * block = ggml_add(c, columns(g, below, first, n), eye);
        ggml_tensor * inverse = ggml_solve_tri(c, block, eye, true, true, false);
        ggml_tensor * part = ggml_mul_mat(c, inverse, residual);
        w = first == 0 ? part : ggml_concat(c, w, part, 0);
    }
    return w;
}

DeltaRule delta_rule(GraphContext & g, const DeltaRuleInputs & in) {
    ggml_context * c = g.ctx;
    const int64_t n = in.qk->ne[1] / 2, n_v = in.state->ne[2], lanes = in.state->ne[3];
    TreeMasks & masks = masks_of(g, n, lanes);

    ggml_tensor * growth = nullptr;
    ggml_tensor * decay = decays(g, in, masks, &growth);
    ggml_tensor * keys = rows(g, in.qk, n, n);
    // Products (k_j q_i) for queries, (k_j k_i) for keys, times decay: [n (j), 2n (i), n_v, lanes].
    ggml_tensor * system = ggml_mul(c, decay, ggml_mul_mat(c, keys, in.qk));
    ggml_tensor * from_state = ggml_mul_mat(c, in.qk, in.state);
    from_state = ggml_mul(c, from_state, growth);

    ggml_tensor * v = ggml_cont(c, ggml_permute(c, in.v, 1, 2, 0, 3));
    v = ggml_sub(c, v, columns(g, from_state, n, n));
    ggml_tensor * w = solve(g, rows(g, system, n, n), v, masks);
    ggml_tensor * out = ggml_mul_mat(c, rows(g, system, 0, n), w);
    out = ggml_add(c, out, columns(g, from_state, 0, n));

    // State after the last node: S <- exp(G) S + sum_j exp(G - G_j) beta_j k_j w_j. G, G_j: sums of
    // log decays up to the last node and node j; w: solution of the triangular system.
    ggml_tensor * last = ggml_view_4d(c, decay, n, 1, n_v, lanes, decay->nb[1], decay->nb[2],
                                      decay->nb[3], (n - 1) * decay->nb[1]);
    ggml_tensor * keys_by_node = ggml_cont(c, ggml_permute(c, keys, 1, 0, 2, 3));
    ggml_tensor * added = ggml_mul_mat(c, keys_by_node, ggml_mul(c, w, last));
    ggml_tensor * decayed = ggml_mul(c, in.state, columns(g, growth, n - 1, 1));
    return {ggml_cont(c, ggml_permute(c, out, 2, 0, 1, 3)), ggml_add(c, decayed, added)};
}

} // namespace dfl
