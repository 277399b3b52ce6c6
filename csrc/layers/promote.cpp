#include "layers/delta_net.h"

#include "layers/delta_rule.h"

#include <cmath>

namespace dfl {

// A path's rows of the trace in all layers. Padding has beta = 0 and g = 0, which changes nothing.
struct PathRows {
    ggml_tensor * nodes; // [trace_size, n, layers]
    ggml_tensor * g;     // [n_v, n, layers]
    ggml_tensor * beta;  // the same

    // Heads of d values from a value on: [d, count, n, layers].
    ggml_tensor * heads(Build & b, int64_t first, int64_t count) const {
        const int64_t d = b.hp.recurrent.d_state;
        return ggml_view_4d(b.ctx, nodes, d, count, nodes->ne[1], nodes->ne[2], d * nodes->nb[0],
                            nodes->nb[1], nodes->nb[2], first * d * nodes->nb[0]);
    }
};

static PathRows gather(Build & b, const RecurrentPart & part, ggml_tensor * path,
                       ggml_tensor * on_path) {
    const RecurrentShape & shape = b.hp.recurrent;
    const int64_t n_v = shape.n_v_heads;
    PathRows rows;
    rows.nodes = ggml_get_rows(b.ctx, part.trace, path);
    auto gate = [&](int64_t first) {
        ggml_tensor * values =
            ggml_view_3d(b.ctx, rows.nodes, n_v, path->ne[0], path->ne[1], rows.nodes->nb[1],
                         rows.nodes->nb[2], first * rows.nodes->nb[0]);
        return ggml_mul(b.ctx, values, on_path);
    };
    rows.g = gate(shape.d_state * (shape.n_k_heads + n_v));
    rows.beta = gate(shape.d_state * (shape.n_k_heads + n_v) + n_v);
    return rows;
}

// All layers of the sequence: [n, layers].
static ggml_tensor * slot_of(Build & b, ggml_tensor * cache) {
    return ggml_view_2d(b.ctx, cache, cache->ne[0], cache->ne[1], cache->nb[1],
                        b.shape.recurrent[0].sequence * cache->nb[2]);
}

// The fused operation once, with the layers as its sequences.
static ggml_tensor * fused_states(Build & b, const RecurrentPart & part, const PathRows & rows) {
    const RecurrentShape & shape = b.hp.recurrent;
    const int64_t d = shape.d_state, n_k = shape.n_k_heads, n_v = shape.n_v_heads;
    const int64_t n = rows.nodes->ne[1], layers = rows.nodes->ne[2];
    ggml_tensor * k = ggml_rms_norm(b.ctx, rows.heads(b, 0, n_k), b.hp.eps / d);
    k = ggml_scale(b.ctx, k, 1.0f / std::sqrt((float)d));
    // Only the state is wanted, so k serves as the query.
    ggml_tensor * out = ggml_gated_delta_net(
        b.ctx, k, k, rows.heads(b, n_k, n_v), ggml_reshape_4d(b.ctx, rows.g, 1, n_v, n, layers),
        ggml_reshape_4d(b.ctx, rows.beta, 1, n_v, n, layers),
        ggml_reshape_4d(b.ctx, slot_of(b, part.state), d, d, n_v, layers), /*K =*/1);
    return ggml_view_1d(b.ctx, out, d * d * n_v * layers, d * n_v * n * layers * sizeof(float));
}

static ggml_tensor * path_state(Build & b, const RecurrentPart & part, const PathRows & rows,
                                int64_t layer) {
    const RecurrentShape & shape = b.hp.recurrent;
    const int64_t d = shape.d_state, n_k = shape.n_k_heads, n_v = shape.n_v_heads;
    const int64_t n = rows.nodes->ne[1];
    const ggml_tensor * nodes = rows.nodes;
    const size_t at = layer * nodes->nb[2], head = d * nodes->nb[0];
    // Only the state is wanted, so the keys serve as the queries too.
    ggml_tensor * k = ggml_view_4d(b.ctx, rows.nodes, d, n, 1, n_k, nodes->nb[1], head, head, at);
    ggml_tensor * v =
        ggml_view_3d(b.ctx, rows.nodes, d, n_v, n, head, nodes->nb[1], at + n_k * head);
    auto gate = [&](ggml_tensor * x) {
        ggml_tensor * one = ggml_view_2d(b.ctx, x, n_v, n, x->nb[1], layer * x->nb[2]);
        return ggml_reshape_3d(b.ctx, ggml_cont(b.ctx, ggml_transpose(b.ctx, one)), n, 1, n_v);
    };
    ggml_tensor * state = part.state;
    state = ggml_view_3d(b.ctx, state, d, d, n_v, d * state->nb[0], d * d * state->nb[0],
                         layer * state->nb[1] + b.shape.recurrent[0].sequence * state->nb[2]);
    ggml_tensor * qk = unit_queries_keys(b, ggml_repeat_4d(b.ctx, k, d, n, 2, n_k));
    return delta_rule(b, {qk, v, gate(rows.g), gate(rows.beta), state, part.shares_keys}).state;
}

static void promote_states(Build & b, const RecurrentPart & part, const PathRows & rows) {
    ggml_tensor * state = part.state; // [state_size, layers, n_sequences]
    auto write = [&](ggml_tensor * from, int64_t layer, int64_t layers) {
        const int64_t n = layers * state->ne[0];
        ggml_tensor * to = ggml_view_1d(
            b.ctx, state, n, layer * state->nb[1] + b.shape.recurrent[0].sequence * state->nb[2]);
        ggml_build_forward_expand(b.graph, ggml_cpy(b.ctx, ggml_reshape_1d(b.ctx, from, n), to));
    };
    if (!b.shape.recurrent[0].by_paths) {
        write(fused_states(b, part, rows), 0, state->ne[1]);
        return;
    }
    for (int64_t layer = 0; layer < state->ne[1]; ++layer) {
        write(path_state(b, part, rows, layer), layer, 1);
    }
}

// Every layer has the same rows.
static ggml_tensor * of_layers(Build & b, ggml_tensor * rows, int64_t n) {
    return n == rows->ne[1] ? rows : ggml_view_2d(b.ctx, rows, rows->ne[0], n, rows->nb[1], 0);
}

void promote(Build & b, const RecurrentPart & part, ggml_tensor * path, ggml_tensor * on_path,
             ggml_tensor * conv_rows) {
    path = of_layers(b, path, part.n_layers);
    conv_rows = of_layers(b, conv_rows, part.n_layers);
    promote_states(b, part, gather(b, part, path, on_path));
    ggml_tensor * last = ggml_get_rows(b.ctx, part.conv_trace, conv_rows);
    ggml_tensor * conv = slot_of(b, part.conv); // [channels * (d_conv - 1), layers]
    ggml_build_forward_expand(
        b.graph,
        ggml_cpy(b.ctx, last, ggml_reshape_3d(b.ctx, conv, last->ne[0], last->ne[1], conv->ne[1])));
}

} // namespace dfl
