#include "layers/moe.h"

#include "layers/cpu_ops/packed_experts.h"
#include "layers/linear.h"

#include <cmath>

namespace dfl {

// weight: [n_in, n_out, n_expert], x: [n_in, n_used or 1, n_rows], ids: [n_used, n_rows].
static ggml_tensor * expert_linear(Build & b, const Linear & l, ggml_tensor * x,
                                   ggml_tensor * ids) {
    ggml_tensor * y = ggml_mul_mat_id(b.ctx, l.weight, x, ids); // [n_out, n_used, n_rows]
    if (l.scale != nullptr) {
        ggml_tensor * per_expert = ggml_reshape_2d(b.ctx, l.scale, 1, l.scale->ne[0]);
        ggml_tensor * flat = ggml_reshape_1d(b.ctx, ggml_cont(b.ctx, ids), ggml_nelements(ids));
        ggml_tensor * chosen = ggml_get_rows(b.ctx, per_expert, flat);
        y = ggml_mul(b.ctx, y, ggml_reshape_3d(b.ctx, chosen, 1, ids->ne[0], ids->ne[1]));
    }
    return l.bias != nullptr ? ggml_add_id(b.ctx, y, l.bias, ids) : y;
}

// The weights of the chosen experts, [1, n_used, n_rows], summing to 1.
static ggml_tensor * expert_weights(Build & b, ggml_tensor * probabilities, ggml_tensor * ids) {
    const int64_t n_expert = probabilities->ne[0];
    const int64_t rows = probabilities->ne[1];
    const int64_t n_used = ids->ne[0];
    ggml_tensor * w =
        ggml_get_rows(b.ctx, ggml_reshape_3d(b.ctx, probabilities, 1, n_expert, rows), ids);
    w = ggml_reshape_2d(b.ctx, w, n_used, rows);
    // The smallest normal half-precision number keeps the division finite.
    ggml_tensor * sum = ggml_clamp(b.ctx, ggml_sum_rows(b.ctx, w), 6.103515625e-5f, INFINITY);
    w = ggml_reshape_3d(b.ctx, ggml_div(b.ctx, w, sum), 1, n_used, rows);
    // Together in the graph, so that a backend may fuse the routing.
    ggml_build_forward_expand(b.graph, w);
    return w;
}

// By ggml's operations.
static ggml_tensor * chosen_experts(Build & b, const ExpertWeights & w, ggml_tensor * x,
                                    ggml_tensor * logits) {
    const int64_t n_embd = x->ne[0];
    const int64_t rows = x->ne[1];
    ggml_tensor * probabilities = ggml_soft_max(b.ctx, logits);
    ggml_tensor * ids = ggml_argsort_top_k(b.ctx, probabilities, b.hp.experts.n_used);
    ggml_tensor * weights = expert_weights(b, probabilities, ids);

    ggml_tensor * input = ggml_reshape_3d(b.ctx, x, n_embd, 1, rows);
    const Activation activation = b.hp.experts.activation;
    ggml_tensor * inner;
    if (w.gate_up) {
        inner = gated(b, activation, expert_linear(b, w.gate_up, input, ids));
    } else {
        ggml_tensor * up = expert_linear(b, w.up, input, ids);
        inner = gated(b, activation, expert_linear(b, w.gate, input, ids), up);
    }
    ggml_tensor * each = expert_linear(b, w.down, inner, ids);
    each = ggml_mul(b.ctx, each, weights); // [n_embd, n_used, n_rows]
    ggml_build_forward_expand(b.graph, each);

    ggml_tensor * out = nullptr;
    for (int64_t i = 0; i < b.hp.experts.n_used; ++i) {
        ggml_tensor * one = ggml_view_2d(b.ctx, each, n_embd, rows, each->nb[2], i * each->nb[1]);
        out = out == nullptr ? one : ggml_add(b.ctx, out, one);
    }
    return b.hp.experts.n_used == 1 ? ggml_cont(b.ctx, out) : out;
}

ggml_tensor * mixture_of_experts(Build & b, int il, const Rows & x, ggml_tensor * add) {
    return mixture_of_experts(b, il, x, x, add);
}

ggml_tensor * mixture_of_experts(Build & b, int il, const Rows & router, const Rows & x,
                                 ggml_tensor * add) {
    const ExpertWeights & w = b.weights.layers[il].experts;
    const Activation activation = b.hp.experts.activation;
    ggml_tensor * logits = linear(b, w.router, router);
    if (w.gate.packed != nullptr) {
        ggml_tensor * routed = route(b, logits, b.hp.experts.n_used);
        BesideExperts beside;
        beside.add = add;
        if (w.shared_gate) {
            beside.score = linear(b, w.shared_gate, x);
            beside.shared = feed_forward(b, w.shared, activation, x, nullptr);
        }
        return packed_experts(b, w, x, routed, beside);
    }
    ggml_tensor * out = chosen_experts(b, w, tensor_of(b, x), logits);
    if (w.shared_gate) {
        ggml_tensor * score = ggml_sigmoid(b.ctx, linear(b, w.shared_gate, x)); // [1, rows]
        ggml_tensor * shared = feed_forward(b, w.shared, activation, x, nullptr);
        out = ggml_add(b.ctx, out, ggml_mul(b.ctx, shared, score));
    }
    return plus(b, out, add);
}

} // namespace dfl
