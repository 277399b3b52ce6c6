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

// Causal depthwise convolution and silu of u [channels, rows, n_seqs] -> same; advances the cache.
static ggml_tensor * convolve(Build & b, int il, ggml_tensor * u) {
    const int64_t channels = u->ne[0];
    const int64_t rows = u->ne[1];
    const int64_t before = b.hp.recurrent.d_conv - 1;
    ggml_tensor * slot = slots(b, b.recurrent.conv(), b.recurrent.index(il));
    ggml_tensor * past = ggml_reshape_3d(b.ctx, slot, channels, before, b.shape.n_seqs);
    ggml_tensor * input = ggml_concat(b.ctx, past, u, 1); // [channels, before + rows, n_seqs]
    ggml_tensor * last = ggml_view_3d(b.ctx, input, channels, before, b.shape.n_seqs, input->nb[1],
                                      input->nb[2], rows * input->nb[1]);
    ggml_build_forward_expand(b.graph, ggml_cpy(b.ctx, last, past));
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
    // The op's result is the outputs [d, n_v, rows, seqs], then the final states [d, d, n_v, seqs].
    const int64_t n_output = d * n_v * rows * seqs;
    ggml_tensor * final_state = ggml_view_2d(b.ctx, out, d * d * n_v, seqs,
                                             d * d * n_v * sizeof(float), n_output * sizeof(float));
    ggml_build_forward_expand(b.graph, ggml_cpy(b.ctx, final_state, slot));

    ggml_tensor * o = ggml_view_2d(b.ctx, out, d, n_v * rows * seqs, d * sizeof(float), 0);
    o = rms_norm(b, o, w.norm);
    ggml_tensor * gated =
        ggml_swiglu_split(b.ctx, ggml_reshape_2d(b.ctx, z, d, n_v * rows * seqs), o);
    return linear(b, w.output, ggml_reshape_2d(b.ctx, gated, d * n_v, rows * seqs));
}

} // namespace dfl
