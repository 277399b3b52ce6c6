#include "layers/delta_net.h"

#include "layers/delta_rule.h"
#include "layers/device_ops.h"

#include <cmath>

namespace dfl {

namespace {

// States [state_size, n_lanes] and their node updates [node_update_size, n_steps, n_lanes]. Lanes
// are the sequences of one layer or, in an engine with one sequence, all layers.
struct States {
    int64_t n_lanes;
    ggml_tensor * values;
    ggml_tensor * nodes;
};

// Copies n_v values of each node update, from value `first` on: [n_v, n_steps, n_lanes].
ggml_tensor * gate(GraphContext & g, const States & states, int64_t first) {
    const ggml_tensor * nodes = states.nodes;
    return ggml_cont(g.ctx,
                     ggml_view_3d(g.ctx, states.nodes, g.hp.recurrent.n_v_heads, nodes->ne[1],
                                  nodes->ne[2], nodes->nb[1], nodes->nb[2], first * nodes->nb[0]));
}

// Views `count` heads of each node update, from head `first` on: [d, count, n_steps, n_lanes].
ggml_tensor * heads(GraphContext & g, const States & states, int64_t first, int64_t count) {
    const ggml_tensor * nodes = states.nodes;
    const size_t head = g.hp.recurrent.d_state * nodes->nb[0];
    return ggml_view_4d(g.ctx, states.nodes, g.hp.recurrent.d_state, count, nodes->ne[1],
                        nodes->ne[2], head, nodes->nb[1], nodes->nb[2], first * head);
}

// Returns the states after the last step. Keys serve as queries, as the outputs have no reader.
ggml_tensor * advanced(GraphContext & g, const States & states) {
    const RecurrentShape & shape = g.hp.recurrent;
    const int64_t d = shape.d_state, n_k = shape.n_k_heads, n_v = shape.n_v_heads;
    const int64_t n = states.nodes->ne[1], lanes = states.n_lanes, size = shape.state_size();
    ggml_tensor * log_decay = gate(g, states, d * (n_k + n_v));
    ggml_tensor * beta = gate(g, states, d * (n_k + n_v) + n_v);
    ggml_tensor * v = heads(g, states, n_k, n_v);
    ggml_tensor * from = ggml_reshape_4d(g.ctx, states.values, d, d, n_v, lanes);
    if (!g.shape.recurrent[0].tree_form) {
        ggml_tensor * k = ggml_rms_norm(g.ctx, heads(g, states, 0, n_k), g.hp.eps / d);
        k = ggml_scale(g.ctx, k, 1.0f / std::sqrt((float)d));
        ggml_tensor * out = ggml_gated_delta_net(
            g.ctx, k, k, v, ggml_reshape_4d(g.ctx, log_decay, 1, n_v, n, lanes),
            ggml_reshape_4d(g.ctx, beta, 1, n_v, n, lanes), from, /*K =*/1);
        return ggml_view_2d(g.ctx, out, size, lanes, size * sizeof(float),
                            d * n_v * n * lanes * sizeof(float));
    }
    ggml_tensor * k = heads(g, states, 0, n_k);
    ggml_tensor * unit = unit_queries_keys(g, ggml_concat(g.ctx, k, k, 1));
    const auto by_step = [&](ggml_tensor * x) {
        return ggml_reshape_4d(g.ctx, ggml_cont(g.ctx, ggml_transpose(g.ctx, x)), n, 1, n_v, lanes);
    };
    ggml_tensor * state =
        delta_rule(g, {queries_keys(g, unit, 0, n), v, by_step(log_decay), by_step(beta), from})
            .state;
    return ggml_reshape_2d(g.ctx, state, size, lanes);
}

ggml_tensor * layer_of(GraphContext & g, ggml_tensor * cache, int64_t layer, int64_t n_rows) {
    return ggml_view_2d(g.ctx, cache, cache->ne[0], n_rows, cache->nb[1], layer * cache->nb[2]);
}

void add(GraphContext & g, ggml_tensor * node) { ggml_build_forward_expand(g.graph, node); }

// Returns the first n columns of `rows`, indices of update rows. The columns are equal, one for
// each recurrent layer of all devices; n: number of recurrent layers on this device.
ggml_tensor * of_layers(GraphContext & g, ggml_tensor * rows, int64_t n) {
    return n == rows->ne[1] ? rows : ggml_view_2d(g.ctx, rows, rows->ne[0], n, rows->nb[1], 0);
}

// Promotes the only sequence of an engine: one operation advances the states of all layers.
void promote_layers(GraphContext & g, const RecurrentPart & part, const PromoteInputs & in) {
    const int64_t layers = part.n_layers, channels = g.hp.recurrent.conv_channels();
    ggml_tensor * nodes = ggml_get_rows(g.ctx, part.node_updates, of_layers(g, in.path, layers));
    ggml_tensor * all =
        ggml_view_2d(g.ctx, part.state, part.state->ne[0], layers, part.state->nb[2], 0);
    add(g, ggml_cpy(g.ctx, advanced(g, {layers, all, nodes}), all));
    ggml_tensor * last =
        ggml_get_rows(g.ctx, part.conv_updates, of_layers(g, in.conv_rows, layers));
    add(g, ggml_cpy(g.ctx, last, ggml_reshape_3d(g.ctx, part.conv, channels, last->ne[1], layers)));
}

void promote_layer(GraphContext & g, const RecurrentPart & part, const PromoteInputs & in,
                   int64_t layer) {
    const RecurrentBatchShape & lanes = g.shape.recurrent[0];
    const RecurrentInputs & slots = g.in.recurrent[0];
    ggml_tensor * nodes = ggml_get_rows(
        g.ctx, layer_of(g, part.node_updates, layer, part.node_updates->ne[1]), in.path);
    nodes = ggml_reshape_3d(g.ctx, nodes, nodes->ne[0], lanes.n_rows, lanes.n_lanes);
    const int64_t n_slots = part.state->ne[1];
    ggml_tensor * all = layer_of(g, part.state, layer, lanes.in_place ? lanes.n_lanes : n_slots);
    ggml_tensor * from = lanes.in_place ? all : ggml_get_rows(g.ctx, all, slots.slots);
    ggml_tensor * to = advanced(g, {lanes.n_lanes, from, nodes});
    add(g,
        lanes.in_place ? ggml_cpy(g.ctx, to, all) : ggml_set_rows(g.ctx, all, to, slots.to_slots));
    ggml_tensor * last = ggml_get_rows(
        g.ctx, layer_of(g, part.conv_updates, layer, part.conv_updates->ne[1]), in.conv_rows);
    last = ggml_reshape_2d(g.ctx, last, part.conv->ne[0], lanes.n_lanes);
    add(g, ggml_set_rows(g.ctx, layer_of(g, part.conv, layer, n_slots), last, in.to_slots));
}

} // namespace

void promote(GraphContext & g, const RecurrentPart & part, const PromoteInputs & in) {
    if (part.has_kernels) {
        promote_on_device(g, part, in);
        return;
    }
    if (in.to_slots == nullptr) {
        promote_layers(g, part, in);
        return;
    }
    for (int64_t layer = 0; layer < part.n_layers; ++layer) {
        promote_layer(g, part, in, layer);
    }
}

} // namespace dfl
