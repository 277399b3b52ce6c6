#include "layers/delta_net.h"

#include "layers/delta_rule.h"

#include <cmath>

namespace dfl {

namespace {

// What is advanced by one operation: lanes of one layer, or, of an engine that holds one sequence,
// all layers as its lanes.
struct States {
    int64_t n_lanes;
    ggml_tensor * values; // [state_size, n_lanes]
    ggml_tensor * nodes;  // of the trace, [node_update_size, n_steps, n_lanes]
};

// Of a node's n_v values from one on: [n_v, n_steps, n_lanes], contiguous.
ggml_tensor * gate(Build & b, const States & states, int64_t first) {
    const ggml_tensor * nodes = states.nodes;
    return ggml_cont(b.ctx,
                     ggml_view_3d(b.ctx, states.nodes, b.hp.recurrent.n_v_heads, nodes->ne[1],
                                  nodes->ne[2], nodes->nb[1], nodes->nb[2], first * nodes->nb[0]));
}

// Heads of d values from one on: [d, count, n_steps, n_lanes].
ggml_tensor * heads(Build & b, const States & states, int64_t first, int64_t count) {
    const ggml_tensor * nodes = states.nodes;
    const size_t head = b.hp.recurrent.d_state * nodes->nb[0];
    return ggml_view_4d(b.ctx, states.nodes, b.hp.recurrent.d_state, count, nodes->ne[1],
                        nodes->ne[2], head, nodes->nb[1], nodes->nb[2], first * head);
}

// The states after the last step, as values. Only they are wanted, so the keys serve as the
// queries too.
ggml_tensor * advanced(Build & b, const States & states) {
    const RecurrentShape & shape = b.hp.recurrent;
    const int64_t d = shape.d_state, n_k = shape.n_k_heads, n_v = shape.n_v_heads;
    const int64_t n = states.nodes->ne[1], lanes = states.n_lanes, size = shape.state_size();
    ggml_tensor * g = gate(b, states, d * (n_k + n_v));
    ggml_tensor * beta = gate(b, states, d * (n_k + n_v) + n_v);
    ggml_tensor * v = heads(b, states, n_k, n_v);
    ggml_tensor * from = ggml_reshape_4d(b.ctx, states.values, d, d, n_v, lanes);
    if (!b.shape.recurrent[0].tree_form) {
        ggml_tensor * k = ggml_rms_norm(b.ctx, heads(b, states, 0, n_k), b.hp.eps / d);
        k = ggml_scale(b.ctx, k, 1.0f / std::sqrt((float)d));
        ggml_tensor * out =
            ggml_gated_delta_net(b.ctx, k, k, v, ggml_reshape_4d(b.ctx, g, 1, n_v, n, lanes),
                                 ggml_reshape_4d(b.ctx, beta, 1, n_v, n, lanes), from, /*K =*/1);
        return ggml_view_2d(b.ctx, out, size, lanes, size * sizeof(float),
                            d * n_v * n * lanes * sizeof(float));
    }
    ggml_tensor * k = heads(b, states, 0, n_k);
    ggml_tensor * unit = unit_queries_keys(b, ggml_concat(b.ctx, k, k, 1));
    const auto by_step = [&](ggml_tensor * x) {
        return ggml_reshape_4d(b.ctx, ggml_cont(b.ctx, ggml_transpose(b.ctx, x)), n, 1, n_v, lanes);
    };
    ggml_tensor * state =
        delta_rule(b, {queries_keys(b, unit, 0, n), v, by_step(g), by_step(beta), from}).state;
    return ggml_reshape_2d(b.ctx, state, size, lanes);
}

ggml_tensor * layer_of(Build & b, ggml_tensor * cache, int64_t layer, int64_t n_rows) {
    return ggml_view_2d(b.ctx, cache, cache->ne[0], n_rows, cache->nb[1], layer * cache->nb[2]);
}

void add(Build & b, ggml_tensor * node) { ggml_build_forward_expand(b.graph, node); }

// Every layer has the same rows.
ggml_tensor * of_layers(Build & b, ggml_tensor * rows, int64_t n) {
    return n == rows->ne[1] ? rows : ggml_view_2d(b.ctx, rows, rows->ne[0], n, rows->nb[1], 0);
}

// A sequence alone: its layers lie side by side.
void promote_layers(Build & b, const RecurrentPart & part, const PromoteInputs & in) {
    const int64_t layers = part.n_layers, channels = b.hp.recurrent.conv_channels();
    ggml_tensor * nodes = ggml_get_rows(b.ctx, part.node_updates, of_layers(b, in.path, layers));
    ggml_tensor * all =
        ggml_view_2d(b.ctx, part.state, part.state->ne[0], layers, part.state->nb[2], 0);
    add(b, ggml_cpy(b.ctx, advanced(b, {layers, all, nodes}), all));
    ggml_tensor * last =
        ggml_get_rows(b.ctx, part.conv_updates, of_layers(b, in.conv_rows, layers));
    add(b, ggml_cpy(b.ctx, last, ggml_reshape_3d(b.ctx, part.conv, channels, last->ne[1], layers)));
}

void promote_layer(Build & b, const RecurrentPart & part, const PromoteInputs & in, int64_t layer) {
    const RecurrentBatchShape & lanes = b.shape.recurrent[0];
    const RecurrentInputs & slots = b.in.recurrent[0];
    ggml_tensor * nodes = ggml_get_rows(
        b.ctx, layer_of(b, part.node_updates, layer, part.node_updates->ne[1]), in.path);
    nodes = ggml_reshape_3d(b.ctx, nodes, nodes->ne[0], lanes.n_rows, lanes.n_lanes);
    const int64_t n_slots = part.state->ne[1];
    ggml_tensor * all = layer_of(b, part.state, layer, lanes.in_place ? lanes.n_lanes : n_slots);
    ggml_tensor * from = lanes.in_place ? all : ggml_get_rows(b.ctx, all, slots.slots);
    ggml_tensor * to = advanced(b, {lanes.n_lanes, from, nodes});
    add(b,
        lanes.in_place ? ggml_cpy(b.ctx, to, all) : ggml_set_rows(b.ctx, all, to, slots.to_slots));
    ggml_tensor * last = ggml_get_rows(
        b.ctx, layer_of(b, part.conv_updates, layer, part.conv_updates->ne[1]), in.conv_rows);
    last = ggml_reshape_2d(b.ctx, last, part.conv->ne[0], lanes.n_lanes);
    add(b, ggml_set_rows(b.ctx, layer_of(b, part.conv, layer, n_slots), last, in.to_slots));
}

} // namespace

void promote(Build & b, const RecurrentPart & part, const PromoteInputs & in) {
    if (in.to_slots == nullptr) {
        promote_layers(b, part, in);
        return;
    }
    for (int64_t layer = 0; layer < part.n_layers; ++layer) {
        promote_layer(b, part, in, layer);
    }
}

} // namespace dfl
