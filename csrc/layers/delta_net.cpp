#include "layers/delta_net.h"

#include "layers/delta_rule.h"
#include "layers/host/walked_delta_net.h"
#include "layers/linear.h"

#include <algorithm>
#include <cmath>

namespace dfl {

// A layer's part of a recurrent cache tensor that is the sequence's, whose rows are built: [n].
static ggml_tensor * slot_of(Build & b, ggml_tensor * cache, int64_t index) {
    const int32_t sequence = b.shape.recurrent[b.of].sequence;
    return ggml_view_1d(b.ctx, cache, cache->ne[0], sequence * cache->nb[2] + index * cache->nb[1]);
}

// One layer of a trace from a row and a value on, as [n, rows].
static ggml_tensor * traced(Build & b, ggml_tensor * trace, int64_t index, int64_t row, int64_t at,
                            int64_t n, int64_t rows) {
    return ggml_view_2d(b.ctx, trace, n, rows, trace->nb[1],
                        index * trace->nb[2] + row * trace->nb[1] + at * trace->nb[0]);
}

static void copy(Build & b, ggml_tensor * from, ggml_tensor * to) {
    ggml_build_forward_expand(b.graph, ggml_cpy(b.ctx, from, to));
}

// The convolution's inputs when verifying: the committed ones, then u [channels, rows], both in the
// trace. [channels, before + rows].
static ggml_tensor * traced_inputs(Build & b, int il, ggml_tensor * u) {
    const RecurrentPart & part = b.recurrent.part_of(il);
    const RecurrentRows & of = b.shape.recurrent[b.of];
    const int64_t index = b.recurrent.index(il);
    const int64_t channels = u->ne[0], rows = u->ne[1], before = b.hp.recurrent.d_conv - 1;
    ggml_tensor * trace = part.conv_trace;
    if (index == 0) { // of all layers of the device at once
        ggml_tensor * conv = part.conv;
        ggml_tensor * past = ggml_view_2d(b.ctx, conv, conv->ne[0], conv->ne[1], conv->nb[1],
                                          of.sequence * conv->nb[2]);
        copy(b, past,
             ggml_view_2d(b.ctx, trace, conv->ne[0], conv->ne[1], trace->nb[2],
                          of.first_conv * trace->nb[1]));
    }
    copy(b, u, traced(b, trace, index, of.first_conv + before, 0, channels, rows));
    return traced(b, trace, index, of.first_conv, 0, channels, before + rows);
}

// A node's window is its parent chain: each tap gathers its rows. inputs: [channels, before + n].
static ggml_tensor * convolve_tree(Build & b, ggml_tensor * inputs, ggml_tensor * kernel) {
    const int64_t d_conv = kernel->ne[0], channels = kernel->ne[1];
    ggml_tensor * rows = b.in.conv_taps[b.of];
    const int64_t n = rows->ne[0] / d_conv;
    ggml_tensor * windows =
        ggml_reshape_3d(b.ctx, ggml_get_rows(b.ctx, inputs, rows), channels, n, d_conv);
    ggml_tensor * taps = ggml_reshape_3d(b.ctx, ggml_cont(b.ctx, ggml_transpose(b.ctx, kernel)),
                                         channels, 1, d_conv);
    ggml_tensor * weighted = ggml_mul(b.ctx, windows, taps);
    ggml_tensor * sum = nullptr;
    for (int64_t t = 0; t < d_conv; ++t) {
        ggml_tensor * one =
            ggml_view_2d(b.ctx, weighted, channels, n, weighted->nb[1], t * weighted->nb[2]);
        sum = t == 0 ? one : ggml_add(b.ctx, sum, one);
    }
    return ggml_reshape_3d(b.ctx, sum, channels, n, 1);
}

// Depthwise convolution and silu of u [channels, rows] -> the same, as [channels, rows, 1].
// Advances the cache, or when verifying leaves it alone and traces u.
static ggml_tensor * convolve(Build & b, int il, ggml_tensor * u) {
    const RecurrentRows & of = b.shape.recurrent[b.of];
    const int64_t channels = u->ne[0], rows = u->ne[1], before = b.hp.recurrent.d_conv - 1;
    ggml_tensor * kernel = b.weights.layers[il].delta.conv;
    ggml_tensor * inputs = nullptr; // [channels, before + rows]
    if (of.verifies) {
        inputs = traced_inputs(b, il, u);
        if (of.by_paths) {
            return ggml_silu(b.ctx, convolve_tree(b, inputs, kernel));
        }
    } else {
        ggml_tensor * slot = slot_of(b, b.recurrent.part_of(il).conv, b.recurrent.index(il));
        ggml_tensor * past = ggml_reshape_2d(b.ctx, slot, channels, before);
        inputs = ggml_concat(b.ctx, past, u, 1);
        copy(b, ggml_view_2d(b.ctx, inputs, channels, before, inputs->nb[1], rows * inputs->nb[1]),
             past);
    }
    ggml_tensor * by_channel = ggml_cont(b.ctx, ggml_transpose(b.ctx, inputs));
    return ggml_silu(b.ctx, ggml_ssm_conv(b.ctx, by_channel, kernel));
}

// What the rule takes of a sequence's rows in a layer. heads: [channels, rows, 1], per row the
// queries' and keys' n_k heads and the values' n_v. g (log decay, <= 0), beta: [n_v, rows].
struct RuleRows {
    ggml_tensor * heads;
    ggml_tensor * g;
    ggml_tensor * beta;
};

// Some heads of all rows: [d, n, rows, 1].
static ggml_tensor * heads_of(Build & b, ggml_tensor * x, int64_t first, int64_t n) {
    const int64_t d = b.hp.recurrent.d_state;
    return ggml_view_4d(b.ctx, x, d, n, x->ne[1], x->ne[2], d * x->nb[0], x->nb[1], x->nb[2],
                        first * d * x->nb[0]);
}

static void write_trace(Build & b, int il, const RuleRows & in) {
    const RecurrentShape & shape = b.hp.recurrent;
    const int64_t d = shape.d_state, n_k = shape.n_k_heads, n_v = shape.n_v_heads;
    const int64_t rows = in.heads->ne[1], key_values = d * (n_k + n_v);
    auto part = [&](int64_t at, int64_t n) {
        return traced(b, b.recurrent.part_of(il).trace, b.recurrent.index(il),
                      b.shape.recurrent[b.of].first_trace, at, n, rows);
    };
    copy(
        b,
        ggml_view_2d(b.ctx, in.heads, key_values, rows, in.heads->nb[1], d * n_k * in.heads->nb[0]),
        part(0, key_values));
    copy(b, in.g, part(key_values, n_v));
    copy(b, in.beta, part(key_values + n_v, n_v));
}

// ggml's own operation, row after row: [d, n_v * rows].
static ggml_tensor * fused_rule(Build & b, int il, const RuleRows & in) {
    const RecurrentShape & shape = b.hp.recurrent;
    const int64_t d = shape.d_state, n_k = shape.n_k_heads, n_v = shape.n_v_heads;
    const int64_t rows = in.heads->ne[1];
    // q and k heads are neighbours, so one norm serves both: x / sqrt(sum x^2 + eps).
    ggml_tensor * qk = ggml_rms_norm(b.ctx, heads_of(b, in.heads, 0, 2 * n_k), b.hp.eps / d);
    qk = ggml_scale(b.ctx, qk, 1.0f / std::sqrt((float)d));
    auto half = [&](int64_t first) {
        return ggml_view_4d(b.ctx, qk, d, n_k, rows, 1, qk->nb[1], qk->nb[2], qk->nb[3],
                            first * qk->nb[1]);
    };
    ggml_tensor * slot = slot_of(b, b.recurrent.part_of(il).state, b.recurrent.index(il));
    ggml_tensor * out =
        ggml_gated_delta_net(b.ctx, half(0), half(n_k), heads_of(b, in.heads, 2 * n_k, n_v),
                             ggml_reshape_4d(b.ctx, in.g, 1, n_v, rows, 1),
                             ggml_reshape_4d(b.ctx, in.beta, 1, n_v, rows, 1),
                             ggml_reshape_4d(b.ctx, slot, d, d, n_v, 1), /*K =*/1);
    // The op's result is the outputs [d, n_v, rows], then the final state [d, d, n_v].
    if (!b.shape.recurrent[b.of].verifies) {
        copy(b, ggml_view_1d(b.ctx, out, d * d * n_v, d * n_v * rows * sizeof(float)), slot);
    }
    return ggml_view_2d(b.ctx, out, d, n_v * rows, d * sizeof(float), 0);
}

// The form for trees; rows that are appended go chunk by chunk. [d, n_v * rows].
static ggml_tensor * path_rule(Build & b, int il, const RuleRows & in) {
    const RecurrentShape & shape = b.hp.recurrent;
    const int64_t d = shape.d_state, n_k = shape.n_k_heads, n_v = shape.n_v_heads;
    const int64_t rows = in.heads->ne[1];
    const RecurrentRows & of = b.shape.recurrent[b.of];
    const bool verifies = of.verifies;
    ggml_tensor * slot = slot_of(b, b.recurrent.part_of(il).state, b.recurrent.index(il));
    ggml_tensor * gates = verifies ? traced(b, b.recurrent.part_of(il).trace, b.recurrent.index(il),
                                            of.first_trace, d * (n_k + n_v), 2 * n_v, rows)
                                   : ggml_concat(b.ctx, in.g, in.beta, 0); // [2 * n_v, rows]
    DeltaRule done = {nullptr, ggml_reshape_3d(b.ctx, slot, d, d, n_v)};
    ggml_tensor * out = nullptr;
    const int64_t chunk = verifies ? rows : PATH_CHUNK;
    for (int64_t first = 0; first < rows; first += chunk) {
        const int64_t n = std::min(chunk, rows - first);
        const size_t at = first * in.heads->nb[1], e = in.heads->nb[0];
        ggml_tensor * qk =
            ggml_view_4d(b.ctx, in.heads, d, n, 2, n_k, in.heads->nb[1], n_k * d * e, d * e, at);
        ggml_tensor * v =
            ggml_view_3d(b.ctx, in.heads, d, n_v, n, d * e, in.heads->nb[1], at + 2 * n_k * d * e);
        ggml_tensor * part =
            ggml_view_2d(b.ctx, gates, 2 * n_v, n, gates->nb[1], first * gates->nb[1]);
        part = ggml_reshape_3d(b.ctx, ggml_cont(b.ctx, ggml_transpose(b.ctx, part)), n, 1, 2 * n_v);
        auto gate = [&](int64_t head) {
            return ggml_view_3d(b.ctx, part, n, 1, n_v, part->nb[1], part->nb[2],
                                head * part->nb[2]);
        };
        done = delta_rule(b, {unit_queries_keys(b, qk), v, gate(0), gate(n_v), done.state,
                              b.recurrent.part_of(il).shares_keys});
        out = out == nullptr ? done.out : ggml_concat(b.ctx, out, done.out, 2);
    }
    if (!verifies) {
        ggml_build_forward_expand(b.graph, out); // it reads the state that goes now
        copy(b, ggml_reshape_1d(b.ctx, done.state, ggml_nelements(slot)),
             ggml_reshape_1d(b.ctx, slot, ggml_nelements(slot)));
    }
    return ggml_reshape_2d(b.ctx, out, d, n_v * rows);
}

// ggml's operations take key head h % n_k for value head h.
static ggml_tensor * reordered(Build & b, ggml_tensor * x, int64_t inner, int64_t outer) {
    const int64_t n = x->ne[0] / (inner * outer); // values of a head
    ggml_tensor * heads = ggml_reshape_4d(b.ctx, x, n, inner, outer, x->ne[1]);
    heads = ggml_cont(b.ctx, ggml_permute(b.ctx, heads, 0, 2, 1, 3));
    return ggml_reshape_2d(b.ctx, heads, x->ne[0], x->ne[1]);
}

// Values of all value heads, [n * n_v, rows], from the file's order to that of ggml's operations.
static ggml_tensor * tiled(Build & b, ggml_tensor * x) {
    const RecurrentShape & shape = b.hp.recurrent;
    return shape.grouped ? reordered(b, x, shape.values_a_key(), shape.n_k_heads) : x;
}

// And back.
static ggml_tensor * as_in_file(Build & b, ggml_tensor * x) {
    const RecurrentShape & shape = b.hp.recurrent;
    return shape.grouped ? reordered(b, x, shape.n_k_heads, shape.values_a_key()) : x;
}

// Queries, keys and values, [channels, rows, 1], with the values' heads so.
static ggml_tensor * tiled_values(Build & b, ggml_tensor * heads) {
    const RecurrentShape & shape = b.hp.recurrent;
    if (!shape.grouped) {
        return heads;
    }
    const int64_t first = 2 * shape.d_state * shape.n_k_heads;
    const auto part = [&](int64_t at, int64_t n) {
        return ggml_cont(
            b.ctx, ggml_view_2d(b.ctx, heads, n, heads->ne[1], heads->nb[1], at * heads->nb[0]));
    };
    ggml_tensor * values = tiled(b, part(first, heads->ne[0] - first));
    ggml_tensor * all = ggml_concat(b.ctx, part(0, first), values, 0);
    return ggml_reshape_3d(b.ctx, all, all->ne[0], all->ne[1], 1);
}

// What becomes beta and the decay, [n_v, rows] each, as in the file.
struct Gates {
    ggml_tensor * beta;
    ggml_tensor * alpha;
};

static Gates gates(Build & b, const DeltaNetWeights & w, const Rows & x) {
    if (!w.beta_alpha) {
        return {linear(b, w.beta, x), linear(b, w.alpha, x)};
    }
    const RecurrentShape & shape = b.hp.recurrent;
    const int64_t n = shape.values_a_key(), rows = x.n_rows();
    ggml_tensor * both = linear(b, w.beta_alpha, x);
    const auto part = [&](int64_t at) {
        ggml_tensor * of_keys = ggml_view_3d(b.ctx, both, n, shape.n_k_heads, rows,
                                             2 * n * both->nb[0], both->nb[1], at * both->nb[0]);
        return ggml_reshape_2d(b.ctx, ggml_cont(b.ctx, of_keys), shape.n_v_heads, rows);
    };
    return {part(0), part(n)};
}

ggml_tensor * delta_net(Build & b, int il, const Rows & x, ggml_tensor * add) {
    const RecurrentShape & shape = b.hp.recurrent;
    const DeltaNetWeights & w = b.weights.layers[il].delta;
    const int64_t inner = shape.d_state * shape.n_v_heads;

    if (b.shape.walks) {
        const std::vector<const Linear *> joint = {&w.qkv, &w.gate, &w.beta_alpha};
        const std::vector<const Linear *> apart = {&w.qkv, &w.gate, &w.beta, &w.alpha};
        const auto in = linears(b, w.beta_alpha ? joint : apart, x);
        return linear(b, w.output, walked_delta_net(b, il, {in[0], in[1], in[2], in.back()}), add);
    }
    ggml_tensor * qkv = linear(b, w.qkv, x);
    ggml_tensor * z = linear(b, w.gate, x); // [inner, n_rows]
    const Gates made = gates(b, w, x);
    ggml_tensor * beta = tiled(b, ggml_sigmoid(b.ctx, made.beta));
    ggml_tensor * g = ggml_softplus(b.ctx, ggml_add(b.ctx, made.alpha, w.dt_bias));
    g = tiled(b, ggml_mul(b.ctx, g, w.a));
    // One sequence after the other: the operations know each by the address of its state.
    ggml_tensor * o = nullptr; // [d, n_v * n_rows]
    for (b.of = 0; b.of < static_cast<int64_t>(b.shape.recurrent.size()); ++b.of) {
        const RecurrentRows & of = b.shape.recurrent[b.of];
        const auto rows_of = [&](ggml_tensor * values) {
            return of.n == values->ne[1] ? values
                                         : ggml_view_2d(b.ctx, values, values->ne[0], of.n,
                                                        values->nb[1], of.first * values->nb[1]);
        };
        ggml_tensor * heads = tiled_values(b, convolve(b, il, rows_of(qkv)));
        RuleRows rows = {heads, rows_of(g), rows_of(beta)};
        if (of.verifies) {
            write_trace(b, il, rows);
        }
        ggml_tensor * part = of.by_paths ? path_rule(b, il, rows) : fused_rule(b, il, rows);
        o = o == nullptr ? part : ggml_concat(b.ctx, o, part, 1);
    }
    b.of = 0;
    o = as_in_file(b, ggml_reshape_2d(b.ctx, o, inner, b.shape.n_rows));
    o = rms_norm(b, ggml_reshape_2d(b.ctx, o, shape.d_state, shape.n_v_heads * b.shape.n_rows),
                 w.norm);
    ggml_tensor * gated =
        ggml_swiglu_split(b.ctx, ggml_reshape_2d(b.ctx, z, o->ne[0], o->ne[1]), o);
    return linear(b, w.output, ggml_reshape_2d(b.ctx, gated, inner, b.shape.n_rows), add);
}

} // namespace dfl
