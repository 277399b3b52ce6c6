#include "layers/delta_net.h"

#include "layers/cpu_ops/scan_delta_net.h"
#include "layers/delta_rule.h"
#include "layers/device_ops.h"
#include "layers/linear.h"

#include <algorithm>
#include <cmath>

namespace dfl {

static const RecurrentBatchShape & lanes(const GraphContext & g) {
    return g.shape.recurrent[g.batch_index];
}
static const RecurrentInputs & lane_inputs(const GraphContext & g) {
    return g.in.recurrent[g.batch_index];
}

static void copy(GraphContext & g, ggml_tensor * from, ggml_tensor * to) {
    ggml_build_forward_expand(g.graph, ggml_cpy(g.ctx, from, to));
}

// Views the first n slots of layer `index` in a recurrent cache tensor: [values of a slot, n].
static ggml_tensor * slots_of(GraphContext & g, ggml_tensor * cache, int64_t index, int64_t n) {
    return ggml_view_2d(g.ctx, cache, cache->ne[0], n, cache->nb[1], index * cache->nb[2]);
}

// Returns the cached recurrent states of the batch's sequences, [values of a state, n_lanes].
static ggml_tensor * of_lanes(GraphContext & g, ggml_tensor * cache, int64_t index) {
    return lanes(g).in_place ? slots_of(g, cache, index, lanes(g).n_lanes)
                             : ggml_get_rows(g.ctx, slots_of(g, cache, index, cache->ne[1]),
                                             lane_inputs(g).slots);
}
static void bring_back(GraphContext & g, ggml_tensor * values, ggml_tensor * cache, int64_t index) {
    if (lanes(g).in_place) {
        copy(g, values, slots_of(g, cache, index, lanes(g).n_lanes));
        return;
    }
    ggml_tensor * all = slots_of(g, cache, index, cache->ne[1]);
    ggml_build_forward_expand(g.graph, ggml_set_rows(g.ctx, all, values, lane_inputs(g).to_slots));
}

// Writes values [n, n_rows] to update rows `rows` of layer `index`, from value `at` of a row on.
static void write_traced(GraphContext & g, ggml_tensor * trace, int64_t index, int64_t at,
                         ggml_tensor * values, ggml_tensor * rows) {
    ggml_tensor * to = ggml_view_2d(g.ctx, trace, values->ne[0], trace->ne[1], trace->nb[1],
                                    index * trace->nb[2] + at * trace->nb[0]);
    ggml_build_forward_expand(g.graph, ggml_set_rows(g.ctx, to, values, rows));
}

// Convolves tree nodes: each tap gathers input rows along the nodes' chains of parents.
static ggml_tensor * convolve_tree(GraphContext & g, ggml_tensor * inputs, ggml_tensor * kernel) {
    const int64_t d_conv = kernel->ne[0], channels = kernel->ne[1], n = lanes(g).size();
    ggml_tensor * all = ggml_reshape_2d(g.ctx, inputs, channels, inputs->ne[1] * inputs->ne[2]);
    ggml_tensor * windows = ggml_get_rows(g.ctx, all, lane_inputs(g).conv_taps);
    windows = ggml_reshape_3d(g.ctx, windows, channels, n, d_conv);
    ggml_tensor * taps = ggml_reshape_3d(g.ctx, ggml_cont(g.ctx, ggml_transpose(g.ctx, kernel)),
                                         channels, 1, d_conv);
    ggml_tensor * weighted = ggml_mul(g.ctx, windows, taps);
    ggml_tensor * sum = nullptr;
    for (int64_t t = 0; t < d_conv; ++t) {
        ggml_tensor * one =
            ggml_view_2d(g.ctx, weighted, channels, n, weighted->nb[1], t * weighted->nb[2]);
        sum = t == 0 ? one : ggml_add(g.ctx, sum, one);
    }
    return ggml_reshape_3d(g.ctx, sum, channels, lanes(g).n_rows, lanes(g).n_lanes);
}

// Convolution inputs. u: those of the pass, [channels, n_rows]; all: committed inputs, then u.
struct ConvolutionInputs {
    ggml_tensor * u;
    ggml_tensor * all;
};

// Returns silu of the convolution. Appended rows are committed, rows of a verify become updates.
static ggml_tensor * convolve(GraphContext & g, int il, const ConvolutionInputs & in) {
    const RecurrentBatchShape & of = lanes(g);
    const RecurrentPart & part = g.recurrent.part_of(il);
    const int64_t index = g.recurrent.index(il);
    const int64_t channels = in.u->ne[0], before = g.hp.recurrent.d_conv - 1;
    ggml_tensor * kernel = g.weights.layers[il].delta.conv;
    ggml_tensor * inputs = nullptr;
    if (of.identity_layout) {
        ggml_tensor * past =
            ggml_reshape_3d(g.ctx, of_lanes(g, part.conv, index), channels, before, of.n_lanes);
        ggml_tensor * u = ggml_reshape_3d(g.ctx, in.u, channels, of.n_rows, of.n_lanes);
        inputs = ggml_concat(g.ctx, past, u, 1);
    } else {
        inputs = ggml_get_rows(g.ctx, in.all, lane_inputs(g).inputs);
        inputs = ggml_reshape_3d(g.ctx, inputs, channels, before + of.n_rows, of.n_lanes);
    }
    if (of.is_verify) {
        ggml_tensor * rows =
            ggml_reshape_2d(g.ctx, inputs, channels, (before + of.n_rows) * of.n_lanes);
        write_traced(g, part.conv_updates, index, 0, rows, lane_inputs(g).conv_update_rows);
        if (of.tree_form) {
            return ggml_silu(g.ctx, convolve_tree(g, inputs, kernel));
        }
    } else if (of.identity_layout) {
        ggml_tensor * last = ggml_view_3d(g.ctx, inputs, channels, before, of.n_lanes,
                                          inputs->nb[1], inputs->nb[2], of.n_rows * inputs->nb[1]);
        bring_back(g, last, part.conv, index);
    } else {
        ggml_tensor * last = ggml_get_rows(g.ctx, in.all, lane_inputs(g).last_inputs);
        bring_back(g, ggml_reshape_2d(g.ctx, last, channels * before, of.n_lanes), part.conv,
                   index);
    }
    ggml_tensor * by_channel = ggml_cont(g.ctx, ggml_transpose(g.ctx, inputs));
    return ggml_silu(g.ctx, ggml_ssm_conv(g.ctx, by_channel, kernel));
}

// Inputs of the delta rule. heads [channels, n_rows, n_lanes]: Q, K and V heads. g (log decay),
// beta: [n_v, n_rows * n_lanes], 0 in padding rows, which therefore leave the state unchanged.
struct RuleRows {
    ggml_tensor * heads;
    ggml_tensor * g;
    ggml_tensor * beta;
};

// Views heads [first, first + n) of all rows: [d, n, n_rows, n_lanes].
static ggml_tensor * heads_of(GraphContext & g, ggml_tensor * x, int64_t first, int64_t n) {
    const int64_t d = g.hp.recurrent.d_state;
    return ggml_view_4d(g.ctx, x, d, n, x->ne[1], x->ne[2], d * x->nb[0], x->nb[1], x->nb[2],
                        first * d * x->nb[0]);
}

static void write_trace(GraphContext & g, int il, const RuleRows & in) {
    const RecurrentShape & shape = g.hp.recurrent;
    const int64_t d = shape.d_state, n_k = shape.n_k_heads, n_v = shape.n_v_heads;
    const int64_t key_values = d * (n_k + n_v);
    const auto write = [&](int64_t at, ggml_tensor * values) {
        write_traced(g, g.recurrent.part_of(il).node_updates, g.recurrent.index(il), at, values,
                     lane_inputs(g).update_rows);
    };
    write(0, ggml_view_2d(g.ctx, in.heads, key_values, lanes(g).size(), in.heads->nb[1],
                          d * n_k * in.heads->nb[0]));
    write(key_values, in.g);
    write(key_values + n_v, in.beta);
}

// Computes the delta rule row by row with ggml's fused operation: [d, n_v * n_rows * n_lanes].
static ggml_tensor * fused_rule(GraphContext & g, int il, const RuleRows & in) {
    const RecurrentShape & shape = g.hp.recurrent;
    const int64_t d = shape.d_state, n_k = shape.n_k_heads, n_v = shape.n_v_heads;
    const int64_t rows = lanes(g).n_rows, n_lanes = lanes(g).n_lanes, size = d * d * n_v;
    // Query and key heads are adjacent, so one norm serves both: x / sqrt(sum(x^2) + eps).
    ggml_tensor * qk = ggml_rms_norm(g.ctx, heads_of(g, in.heads, 0, 2 * n_k), g.hp.eps / d);
    qk = ggml_scale(g.ctx, qk, 1.0f / std::sqrt((float)d));
    auto half = [&](int64_t first) {
        return ggml_view_4d(g.ctx, qk, d, n_k, rows, n_lanes, qk->nb[1], qk->nb[2], qk->nb[3],
                            first * qk->nb[1]);
    };
    ggml_tensor * states = of_lanes(g, g.recurrent.part_of(il).state, g.recurrent.index(il));
    ggml_tensor * out =
        ggml_gated_delta_net(g.ctx, half(0), half(n_k), heads_of(g, in.heads, 2 * n_k, n_v),
                             ggml_reshape_4d(g.ctx, in.g, 1, n_v, rows, n_lanes),
                             ggml_reshape_4d(g.ctx, in.beta, 1, n_v, rows, n_lanes),
                             ggml_reshape_4d(g.ctx, states, d, d, n_v, n_lanes), /*K =*/1);
    // The operation returns the outputs [d, n_v, rows, lanes], then the states [d, d, n_v, lanes].
    const int64_t n_out = d * n_v * rows * n_lanes;
    if (!lanes(g).is_verify) {
        bring_back(
            g, ggml_view_2d(g.ctx, out, size, n_lanes, size * sizeof(float), n_out * sizeof(float)),
            g.recurrent.part_of(il).state, g.recurrent.index(il));
    }
    return ggml_view_2d(g.ctx, out, d, n_out / d, d * sizeof(float), 0);
}

// Computes the delta rule in tree form, appended rows in chunks: [d, n_v * n_rows * n_lanes].
static ggml_tensor * path_rule(GraphContext & g, int il, const RuleRows & in) {
    const RecurrentShape & shape = g.hp.recurrent;
    const int64_t d = shape.d_state, n_k = shape.n_k_heads, n_v = shape.n_v_heads;
    const int64_t rows = lanes(g).n_rows, n_lanes = lanes(g).n_lanes;
    const bool verifies = lanes(g).is_verify;
    ggml_tensor * states = of_lanes(g, g.recurrent.part_of(il).state, g.recurrent.index(il));
    DeltaRule done = {nullptr, ggml_reshape_4d(g.ctx, states, d, d, n_v, n_lanes)};
    ggml_tensor * unit = unit_queries_keys(g, heads_of(g, in.heads, 0, 2 * n_k));
    ggml_tensor * v = heads_of(g, in.heads, 2 * n_k, n_v);
    ggml_tensor * out = nullptr;
    const int64_t chunk = verifies ? rows : TREE_FORM_CHUNK;
    for (int64_t first = 0; first < rows; first += chunk) {
        const int64_t n = std::min(chunk, rows - first);
        auto gate = [&](ggml_tensor * x) {
            const size_t row = x->nb[1];
            ggml_tensor * part =
                ggml_view_3d(g.ctx, x, n_v, n, n_lanes, row, rows * row, first * row);
            return ggml_reshape_4d(g.ctx, ggml_cont(g.ctx, ggml_transpose(g.ctx, part)), n, 1, n_v,
                                   n_lanes);
        };
        ggml_tensor * values = ggml_view_4d(g.ctx, v, d, n_v, n, n_lanes, v->nb[1], v->nb[2],
                                            v->nb[3], first * v->nb[2]);
        done = delta_rule(
            g, {queries_keys(g, unit, first, n), values, gate(in.g), gate(in.beta), done.state});
        out = out == nullptr ? done.out : ggml_concat(g.ctx, out, done.out, 2);
    }
    if (!verifies) {
        ggml_build_forward_expand(g.graph,
                                  out); // the old state must be read before the new is written
        bring_back(g, ggml_reshape_2d(g.ctx, done.state, d * d * n_v, n_lanes),
                   g.recurrent.part_of(il).state, g.recurrent.index(il));
    }
    return ggml_reshape_2d(g.ctx, out, d, n_v * rows * n_lanes);
}

// Computes the rows of a verify with our own kernels: [d, n_v * n_rows * n_lanes].
static ggml_tensor * verified(GraphContext & g, int il, const RuleRows & in) {
    ggml_tensor * out = delta_tree_on_device(g, il, in.heads, in.g, in.beta);
    return ggml_reshape_2d(g.ctx, out, out->ne[0], ggml_nrows(out));
}

// Reorders heads [inner, outer] to [outer, inner]: ggml pairs value head h with key head h % n_k.
static ggml_tensor * reordered(GraphContext & g, ggml_tensor * x, int64_t inner, int64_t outer) {
    const int64_t n = x->ne[0] / (inner * outer);
    ggml_tensor * heads = ggml_reshape_4d(g.ctx, x, n, inner, outer, x->ne[1]);
    heads = ggml_cont(g.ctx, ggml_permute(g.ctx, heads, 0, 2, 1, 3));
    return ggml_reshape_2d(g.ctx, heads, x->ne[0], x->ne[1]);
}

// Reorders value heads, [n * n_v, rows], from the file's order to the order of ggml's operations.
static ggml_tensor * tiled(GraphContext & g, ggml_tensor * x) {
    const RecurrentShape & shape = g.hp.recurrent;
    return shape.grouped ? reordered(g, x, shape.values_a_key(), shape.n_k_heads) : x;
}

static ggml_tensor * as_in_file(GraphContext & g, ggml_tensor * x) {
    const RecurrentShape & shape = g.hp.recurrent;
    return shape.grouped ? reordered(g, x, shape.n_k_heads, shape.values_a_key()) : x;
}

static ggml_tensor * tiled_values(GraphContext & g, ggml_tensor * heads) {
    const RecurrentShape & shape = g.hp.recurrent;
    if (!shape.grouped) {
        return heads;
    }
    const int64_t rows = heads->ne[1], n_lanes = heads->ne[2];
    heads = ggml_reshape_2d(g.ctx, heads, heads->ne[0], rows * n_lanes);
    const int64_t first = 2 * shape.d_state * shape.n_k_heads;
    const auto part = [&](int64_t at, int64_t n) {
        return ggml_cont(
            g.ctx, ggml_view_2d(g.ctx, heads, n, heads->ne[1], heads->nb[1], at * heads->nb[0]));
    };
    ggml_tensor * values = tiled(g, part(first, heads->ne[0] - first));
    ggml_tensor * all = ggml_concat(g.ctx, part(0, first), values, 0);
    return ggml_reshape_3d(g.ctx, all, all->ne[0], rows, n_lanes);
}

// Products that beta and the decay are computed from, [n_v, rows], with heads in the file's order.
struct Gates {
    ggml_tensor * beta;
    ggml_tensor * alpha;
};

static Gates gates(GraphContext & g, const DeltaNetWeights & w, const Rows & x) {
    if (!w.beta_alpha) {
        return {linear(g, w.beta, x), linear(g, w.alpha, x)};
    }
    const RecurrentShape & shape = g.hp.recurrent;
    const int64_t n = shape.values_a_key(), rows = x.n_rows();
    ggml_tensor * both = linear(g, w.beta_alpha, x);
    const auto part = [&](int64_t at) {
        ggml_tensor * of_keys = ggml_view_3d(g.ctx, both, n, shape.n_k_heads, rows,
                                             2 * n * both->nb[0], both->nb[1], at * both->nb[0]);
        return ggml_reshape_2d(g.ctx, ggml_cont(g.ctx, of_keys), shape.n_v_heads, rows);
    };
    return {part(0), part(n)};
}

ggml_tensor * delta_net(GraphContext & g, int il, const Rows & x, ggml_tensor * add) {
    const RecurrentShape & shape = g.hp.recurrent;
    const DeltaNetWeights & w = g.weights.layers[il].delta;
    const int64_t inner = shape.d_state * shape.n_v_heads;

    if (g.shape.scans) {
        const std::vector<const Linear *> joint = {&w.qkv, &w.gate, &w.beta_alpha};
        const std::vector<const Linear *> separate = {&w.qkv, &w.gate, &w.beta, &w.alpha};
        const auto in = linears(g, w.beta_alpha ? joint : separate, x);
        return linear(g, w.output, scan_delta_net(g, il, {in[0], in[1], in[2], in.back()}), add);
    }
    ggml_tensor * qkv = linear(g, w.qkv, x);
    ggml_tensor * z = linear(g, w.gate, x);
    const Gates beta_alpha = gates(g, w, x);
    ggml_tensor * beta = tiled(g, ggml_sigmoid(g.ctx, beta_alpha.beta));
    ggml_tensor * log_decay = ggml_softplus(g.ctx, ggml_add(g.ctx, beta_alpha.alpha, w.dt_bias));
    log_decay = tiled(g, ggml_mul(g.ctx, log_decay, w.a));
    ConvolutionInputs inputs = {qkv, nullptr};
    const bool picks = !g.shape.recurrent.front().identity_layout;
    if (picks) {
        ggml_tensor * conv = g.recurrent.part_of(il).conv;
        const int64_t n_before = (shape.d_conv - 1) * conv->ne[1];
        ggml_tensor * past = ggml_view_2d(g.ctx, conv, qkv->ne[0], n_before, qkv->nb[1],
                                          g.recurrent.index(il) * conv->nb[2]);
        inputs.all = ggml_concat(g.ctx, past, qkv, 1);
        log_decay = ggml_pad(g.ctx, log_decay, 0, 1, 0, 0);
        beta = ggml_pad(g.ctx, beta, 0, 1, 0, 0);
    }
    // Batches that update slots in place come first: their idle lanes write old values to slots
    // that later batches then update.
    ggml_tensor * o = nullptr;
    for (g.batch_index = 0; g.batch_index < static_cast<int64_t>(g.shape.recurrent.size());
         ++g.batch_index) {
        const auto rows_of = [&](ggml_tensor * values) {
            return picks ? ggml_get_rows(g.ctx, values, lane_inputs(g).rows) : values;
        };
        const bool is_ours = lanes(g).is_verify && g.recurrent.part_of(il).has_kernels;
        ggml_tensor * heads =
            tiled_values(g, is_ours ? convolve_on_device(g, il, qkv) : convolve(g, il, inputs));
        RuleRows rows = {heads, rows_of(log_decay), rows_of(beta)};
        if (lanes(g).is_verify && !is_ours) {
            write_trace(g, il, rows);
        }
        ggml_tensor * part = is_ours              ? verified(g, il, rows)
                             : lanes(g).tree_form ? path_rule(g, il, rows)
                                                  : fused_rule(g, il, rows);
        o = o == nullptr ? part : ggml_concat(g.ctx, o, part, 1);
    }
    if (picks) {
        o = ggml_reshape_2d(g.ctx, o, inner, o->ne[1] / shape.n_v_heads);
        o = ggml_get_rows(g.ctx, o, g.in.lane_rows);
    }
    g.batch_index = 0;
    o = as_in_file(g, ggml_reshape_2d(g.ctx, o, inner, g.shape.n_rows));
    o = rms_norm(g, ggml_reshape_2d(g.ctx, o, shape.d_state, shape.n_v_heads * g.shape.n_rows),
                 w.norm);
    ggml_tensor * gated =
        ggml_swiglu_split(g.ctx, ggml_reshape_2d(g.ctx, z, o->ne[0], o->ne[1]), o);
    return linear(g, w.output, ggml_reshape_2d(g.ctx, gated, inner, g.shape.n_rows), add);
}

} // namespace dfl
