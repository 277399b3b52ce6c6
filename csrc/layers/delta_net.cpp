#include "layers/delta_net.h"

#include "layers/common.h"

#include <cmath>

namespace dfl {

// Rows of the batch's sequences in one layer of a recurrent cache tensor, as [n, n_seqs].
static ggml_tensor * slots(Build & b, ggml_tensor * cache, int64_t index) {
    const BatchShape & s = b.shape;
    return ggml_view_2d(b.ctx, cache, cache->ne[0], s.n_seqs, cache->nb[1],
                        index * cache->nb[2] + s.first_seq * cache->nb[1]);
}

// Writes src [n, rows] into the first rows of a layer's trace from offset values on.
static void write_trace(Build & b, ggml_tensor * trace, int64_t index, int64_t offset,
                        ggml_tensor * src, int64_t n, int64_t rows) {
    ggml_tensor * dst = ggml_view_2d(b.ctx, trace, n, rows, trace->nb[1],
                                     index * trace->nb[2] + offset * sizeof(float));
    ggml_build_forward_expand(b.graph, ggml_cpy(b.ctx, src, dst));
}

// Causal depthwise convolution and silu of u [channels, rows, n_seqs] -> same. Advances the cache,
// or when verifying leaves it alone and traces u.
static ggml_tensor * convolve(Build & b, int il, ggml_tensor * u) {
    const int64_t channels = u->ne[0];
    const int64_t rows = u->ne[1];
    const int64_t before = b.hp.recurrent.d_conv - 1;
    ggml_tensor * slot = slots(b, b.recurrent.conv(), b.recurrent.index(il));
    ggml_tensor * past = ggml_reshape_3d(b.ctx, slot, channels, before, b.shape.n_seqs);
    ggml_tensor * input = ggml_concat(b.ctx, past, u, 1); // [channels, before + rows, n_seqs]
    ggml_tensor * last = ggml_view_3d(b.ctx, input, channels, before, b.shape.n_seqs, input->nb[1],
                                      input->nb[2], rows * input->nb[1]);
    if (b.shape.kind == GraphKind::VERIFY) {
        write_trace(b, b.recurrent.conv_trace(), b.recurrent.index(il), 0, u, channels, rows);
    } else {
        ggml_build_forward_expand(b.graph, ggml_cpy(b.ctx, last, past));
    }
    ggml_tensor * by_channel = ggml_cont(b.ctx, ggml_transpose(b.ctx, input));
    ggml_tensor * y = ggml_ssm_conv(b.ctx, by_channel, b.weights.layers[il].delta.conv);
    return ggml_silu(b.ctx, y);
}

ggml_tensor * delta_net(Build & b, int il, ggml_tensor * x) {
    const RecurrentShape & shape = b.hp.recurrent;
    const DeltaNetWeights & w = b.weights.layers[il].delta;
    const int64_t d = shape.d_state;
    const int64_t n_k = shape.n_k_heads;
    const int64_t n_v = shape.n_v_heads;
    const int64_t seqs = b.shape.n_seqs;
    const int64_t rows = b.shape.n_rows / seqs;

    ggml_tensor * qkv = linear(b, w.qkv, x);
    ggml_tensor * z = linear(b, w.gate, x); // [d * n_v, n_rows]
    ggml_tensor * beta = ggml_sigmoid(b.ctx, linear(b, w.beta, x));
    ggml_tensor * g = ggml_softplus(b.ctx, ggml_add(b.ctx, linear(b, w.alpha, x), w.dt_bias));
    g = ggml_mul(b.ctx, g, w.a); // log decay, <= 0

    ggml_tensor * conv =
        convolve(b, il, ggml_reshape_3d(b.ctx, qkv, shape.conv_channels(), rows, seqs));
    const size_t e = ggml_element_size(conv);
    auto heads = [&](ggml_tensor * from, int64_t n, int64_t first) {
        return ggml_view_4d(b.ctx, from, d, n, rows, seqs, d * e, from->nb[1], from->nb[2],
                            first * d * e);
    };
    // q and k heads are neighbours, so one norm serves both: x / sqrt(sum x^2 + eps).
    ggml_tensor * qk =
        ggml_view_4d(b.ctx, conv, d, 2 * n_k, rows, seqs, d * e, conv->nb[1], conv->nb[2], 0);
    qk = ggml_scale(b.ctx, ggml_rms_norm(b.ctx, qk, b.hp.eps / d), 1.0f / std::sqrt((float)d));
    ggml_tensor * q =
        ggml_view_4d(b.ctx, qk, d, n_k, rows, seqs, qk->nb[1], qk->nb[2], qk->nb[3], 0);
    ggml_tensor * k = ggml_view_4d(b.ctx, qk, d, n_k, rows, seqs, qk->nb[1], qk->nb[2], qk->nb[3],
                                   n_k * qk->nb[1]);
    ggml_tensor * v = heads(conv, n_v, 2 * n_k);

    ggml_tensor * slot = slots(b, b.recurrent.state(), b.recurrent.index(il));
    ggml_tensor * state = ggml_reshape_4d(b.ctx, slot, d, d, n_v, seqs);
    ggml_tensor * out =
        ggml_gated_delta_net(b.ctx, q, k, v, ggml_reshape_4d(b.ctx, g, 1, n_v, rows, seqs),
                             ggml_reshape_4d(b.ctx, beta, 1, n_v, rows, seqs), state, /*K =*/1);
    if (b.shape.kind == GraphKind::VERIFY) {
        const int64_t index = b.recurrent.index(il);
        ggml_tensor * trace = b.recurrent.trace();
        auto flat = [&](ggml_tensor * x, int64_t n) {
            return ggml_view_2d(b.ctx, x, n, rows, x->nb[2], 0);
        };
        write_trace(b, trace, index, 0, flat(k, d * n_k), d * n_k, rows);
        write_trace(b, trace, index, d * n_k, flat(v, d * n_v), d * n_v, rows);
        write_trace(b, trace, index, d * (n_k + n_v), g, n_v, rows);
        write_trace(b, trace, index, d * (n_k + n_v) + n_v, beta, n_v, rows);
    }
    // The op's result is the outputs [d, n_v, rows, seqs], then the final states [d, d, n_v, seqs].
    const int64_t n_output = d * n_v * rows * seqs;
    ggml_tensor * final_state = ggml_view_2d(b.ctx, out, d * d * n_v, seqs,
                                             d * d * n_v * sizeof(float), n_output * sizeof(float));
    if (b.shape.kind != GraphKind::VERIFY) {
        ggml_build_forward_expand(b.graph, ggml_cpy(b.ctx, final_state, slot));
    }

    ggml_tensor * o = ggml_view_2d(b.ctx, out, d, n_v * rows * seqs, d * sizeof(float), 0);
    o = rms_norm(b, o, w.norm);
    ggml_tensor * gated =
        ggml_swiglu_split(b.ctx, ggml_reshape_2d(b.ctx, z, d, n_v * rows * seqs), o);
    return linear(b, w.output, ggml_reshape_2d(b.ctx, gated, d * n_v, rows * seqs));
}

// The state after the path: the fused op once, with the layers as its sequences. Padding has
// beta = 0 and g = 0, which changes nothing.
static void promote_state(Build & b, ggml_tensor * path, ggml_tensor * on_path) {
    const RecurrentShape & shape = b.hp.recurrent;
    const int64_t d = shape.d_state, n_k = shape.n_k_heads, n_v = shape.n_v_heads;
    const int64_t n = path->ne[0], layers = path->ne[1];
    ggml_tensor * nodes =
        ggml_get_rows(b.ctx, b.recurrent.trace(), path); // [trace_size, n, layers]
    constexpr size_t e = sizeof(float);
    auto heads = [&](int64_t count, int64_t first) {
        return ggml_view_4d(b.ctx, nodes, d, count, n, layers, d * e, nodes->nb[1], nodes->nb[2],
                            first * e);
    };
    auto gate = [&](int64_t first) {
        ggml_tensor * values =
            ggml_cont(b.ctx, ggml_view_3d(b.ctx, nodes, n_v, n, layers, nodes->nb[1], nodes->nb[2],
                                          first * e));
        return ggml_reshape_4d(b.ctx, ggml_mul(b.ctx, values, on_path), 1, n_v, n, layers);
    };
    ggml_tensor * k = heads(n_k, 0);
    ggml_tensor * v = heads(n_v, d * n_k);
    ggml_tensor * g = gate(d * (n_k + n_v));
    ggml_tensor * beta = gate(d * (n_k + n_v) + n_v);
    ggml_tensor * state = b.recurrent.state(); // [state_size, 1, layers]
    // Only the state is wanted, so k serves as the query.
    ggml_tensor * out = ggml_gated_delta_net(
        b.ctx, k, k, v, g, beta, ggml_reshape_4d(b.ctx, state, d, d, n_v, layers), /*K =*/1);
    ggml_tensor * after = ggml_view_1d(b.ctx, out, ggml_nelements(state), d * n_v * n * layers * e);
    ggml_build_forward_expand(
        b.graph, ggml_cpy(b.ctx, after, ggml_reshape_1d(b.ctx, state, ggml_nelements(state))));
}

void promote(Build & b, ggml_tensor * path, ggml_tensor * on_path, ggml_tensor * conv_rows) {
    promote_state(b, path, on_path);
    const int64_t channels = b.hp.recurrent.conv_channels();
    ggml_tensor * conv = b.recurrent.conv();
    ggml_tensor * past =
        ggml_reshape_3d(b.ctx, conv, channels, b.hp.recurrent.d_conv - 1, conv->ne[2]);
    ggml_tensor * trace = b.recurrent.conv_trace();
    ggml_tensor * traced = ggml_view_3d(b.ctx, trace, channels, path->ne[0], trace->ne[2],
                                        trace->nb[1], trace->nb[2], 0);
    ggml_tensor * inputs = ggml_concat(b.ctx, past, traced, 1);
    ggml_tensor * last = ggml_get_rows(b.ctx, inputs, conv_rows); // [channels, d_conv - 1, layers]
    ggml_build_forward_expand(b.graph, ggml_cpy(b.ctx, last, past));
}

} // namespace dfl
