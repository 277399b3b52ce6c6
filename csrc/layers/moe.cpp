#include "layers/moe.h"

#include "layers/cpu_ops/packed_experts.h"
#include "layers/linear.h"

#include <cmath>

namespace dfl {

// Multiplies x [n_in, n_used or 1, n_rows] with the rows' experts: [n_out, n_used, n_rows].
static ggml_tensor * expert_linear(GraphContext & g, const Linear & l, ggml_tensor * x,
                                   ggml_tensor * ids) {
    ggml_tensor * y = ggml_mul_mat_id(g.ctx, l.weight, x, ids);
    if (l.scale != nullptr) {
        ggml_tensor * per_expert = ggml_reshape_2d(g.ctx, l.scale, 1, l.scale->ne[0]);
        ggml_tensor * flat = ggml_reshape_1d(g.ctx, ggml_cont(g.ctx, ids), ggml_nelements(ids));
        ggml_tensor * chosen = ggml_get_rows(g.ctx, per_expert, flat);
        y = ggml_mul(g.ctx, y, ggml_reshape_3d(g.ctx, chosen, 1, ids->ne[0], ids->ne[1]));
    }
    return l.bias != nullptr ? ggml_add_id(g.ctx, y, l.bias, ids) : y;
}

// Returns the weights of the chosen experts, [1, n_used, n_rows]. They sum to 1 in each row.
static ggml_tensor * expert_weights(GraphContext & g, ggml_tensor * probabilities,
                                    ggml_tensor * ids) {
    const int64_t n_expert = probabilities->ne[0];
    const int64_t rows = probabilities->ne[1];
    const int64_t n_used = ids->ne[0];
    ggml_tensor * w =
        ggml_get_rows(g.ctx, ggml_reshape_3d(g.ctx, probabilities, 1, n_expert, rows), ids);
    w = ggml_reshape_2d(g.ctx, w, n_used, rows);
    // Divides by at least the smallest normal half-precision number, so that weights are finite.
    ggml_tensor * sum = ggml_clamp(g.ctx, ggml_sum_rows(g.ctx, w), 6.103515625e-5f, INFINITY);
    w = ggml_reshape_3d(g.ctx, ggml_div(g.ctx, w, sum), 1, n_used, rows);
    // A backend can fuse the routing nodes only if they are adjacent in the graph.
    ggml_build_forward_expand(g.graph, w);
    return w;
}

// Returns the weighted sum of the routed experts, by ggml's operations.
static ggml_tensor * chosen_experts(GraphContext & g, const ExpertWeights & w, ggml_tensor * x,
                                    ggml_tensor * logits) {
    const int64_t n_embd = x->ne[0];
    const int64_t rows = x->ne[1];
    ggml_tensor * probabilities = ggml_soft_max(g.ctx, logits);
    ggml_tensor * ids = ggml_argsort_top_k(g.ctx, probabilities, g.hp.experts.n_used);
    ggml_tensor * weights = expert_weights(g, probabilities, ids);

    ggml_tensor * input = ggml_reshape_3d(g.ctx, x, n_embd, 1, rows);
    const Activation activation = g.hp.experts.activation;
    ggml_tensor * inner;
    if (w.gate_up) {
        inner = gated(g, activation, expert_linear(g, w.gate_up, input, ids));
    } else {
        ggml_tensor * up = expert_linear(g, w.up, input, ids);
        inner = gated(g, activation, expert_linear(g, w.gate, input, ids), up);
    }
    ggml_tensor * each = expert_linear(g, w.down, inner, ids);
    each = ggml_mul(g.ctx, each, weights);
    ggml_build_forward_expand(g.graph, each);

    ggml_tensor * out = nullptr;
    for (int64_t i = 0; i < g.hp.experts.n_used; ++i) {
        ggml_tensor * one = ggml_view_2d(g.ctx, each, n_embd, rows, each->nb[2], i * each->nb[1]);
        out = out == nullptr ? one : ggml_add(g.ctx, out, one);
    }
    return g.hp.experts.n_used == 1 ? ggml_cont(g.ctx, out) : out;
}

ggml_tensor * mixture_of_experts(GraphContext & g, int il, const Rows & router, const Rows & x,
                                 ggml_tensor * add) {
    const ExpertWeights & w = g.weights.layers[il].experts;
    const Activation activation = g.hp.experts.activation;
    ggml_tensor * logits = linear(g, w.router, router);
    if (w.gate.packed != nullptr) {
        ggml_tensor * routed = route(g, logits, g.hp.experts.n_used);
        ExpertSumTerms terms;
        terms.add = add;
        if (w.shared_gate) {
            terms.score = linear(g, w.shared_gate, x);
            terms.shared = feed_forward(g, w.shared, activation, x, nullptr);
        }
        return packed_experts(g, w, x, routed, terms);
    }
    ggml_tensor * out = chosen_experts(g, w, tensor_of(g, x), logits);
    if (w.shared_gate) {
        ggml_tensor * score = ggml_sigmoid(g.ctx, linear(g, w.shared_gate, x));
        ggml_tensor * shared = feed_forward(g, w.shared, activation, x, nullptr);
        out = ggml_add(g.ctx, out, ggml_mul(g.ctx, shared, score));
    }
    return plus(g, out, add);
}

} // namespace dfl
