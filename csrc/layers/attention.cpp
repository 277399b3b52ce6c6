#include "layers/attention.h"

#include "layers/common.h"
#include "layers/few_row_attention.h"

namespace dfl {

KeyValue project_kv(Build & b, int il, ggml_tensor * x) {
    const LayerShape & shape = b.hp.layers[il];
    const AttentionWeights & w = b.weights.layers[il].attn;
    auto heads = [&](ggml_tensor * y) {
        return ggml_reshape_3d(b.ctx, y, shape.head_dim, shape.n_head_kv, x->ne[1]);
    };
    ggml_tensor * k = heads(linear(b, w.k, x));
    return {k, w.v ? heads(linear(b, w.v, x)) : ggml_rms_norm(b.ctx, k, b.hp.eps)};
}

Projections project_qkv(Build & b, int il, ggml_tensor * x, int64_t q_width) {
    const LayerShape & shape = b.hp.layers[il];
    const AttentionWeights & w = b.weights.layers[il].attn;
    const int64_t d = shape.head_dim;
    const int64_t n_kv = shape.n_head_kv;
    const int64_t rows = x->ne[1];
    if (!w.qkv) {
        const KeyValue kv = project_kv(b, il, x);
        return {linear(b, w.q, x), kv.k, kv.v};
    }
    if (is_faster_apart(w.qkv, x)) {
        auto part = [&](int64_t first, int64_t n) {
            return linear(b, part_of(b, w.qkv, first, n), x);
        };
        auto heads = [&](int64_t first) {
            return ggml_reshape_3d(b.ctx, part(first, d * n_kv), d, n_kv, rows);
        };
        return {part(0, q_width), heads(q_width), heads(q_width + d * n_kv)};
    }
    ggml_tensor * all = linear(b, w.qkv, x); // [q_width + 2 * d * n_kv, n_rows]
    const size_t element = ggml_element_size(all);
    auto heads = [&](int64_t first) {
        return ggml_view_3d(b.ctx, all, d, n_kv, rows, d * element, all->nb[1], first * element);
    };
    return {ggml_view_2d(b.ctx, all, q_width, rows, all->nb[1], 0), heads(q_width),
            heads(q_width + d * n_kv)};
}

ggml_tensor * rope(Build & b, int il, ggml_tensor * x, ggml_tensor * positions) {
    const RopeShape & r = b.hp.layers[il].rope;
    constexpr float beta_fast = 32.0f, beta_slow = 1.0f;
    if (positions->ne[0] == x->ne[2]) {
        return ggml_rope_ext(b.ctx, x, positions, b.weights.rope_freqs, r.n_dims, r.type,
                             r.n_ctx_orig, r.freq_base, r.freq_scale, r.ext_factor, r.attn_factor,
                             beta_fast, beta_slow);
    }
    int sections[4] = {r.sections[0], r.sections[1], r.sections[2], r.sections[3]};
    return ggml_rope_multi(b.ctx, x, positions, b.weights.rope_freqs, r.n_dims, sections, r.type,
                           r.n_ctx_orig, r.freq_base, r.freq_scale, r.ext_factor, r.attn_factor,
                           beta_fast, beta_slow);
}

// Multiplies each block of head values with the Hadamard matrix. Its inverse is itself.
static ggml_tensor * rotate(Build & b, ggml_tensor * x, ggml_tensor * rotation) {
    if (rotation == nullptr) {
        return x;
    }
    if (!ggml_is_contiguous(x)) {
        x = ggml_cont(b.ctx, x);
    }
    ggml_tensor * blocks =
        ggml_reshape_2d(b.ctx, x, rotation->ne[0], ggml_nelements(x) / rotation->ne[0]);
    ggml_tensor * rotated = ggml_mul_mat(b.ctx, rotation, blocks);
    ggml_mul_mat_set_hint(rotated, GGML_HINT_SRC0_IS_HADAMARD);
    return ggml_reshape_4d(b.ctx, rotated, x->ne[0], x->ne[1], x->ne[2], x->ne[3]);
}

// The first n_kv rows of a cache tensor as [head_dim, n_kv, n_head_kv].
static ggml_tensor * cached(Build & b, const LayerShape & shape, ggml_tensor * cache) {
    ggml_tensor * rows = ggml_view_3d(b.ctx, cache, shape.head_dim, shape.n_head_kv, b.shape.n_kv,
                                      ggml_row_size(cache->type, shape.head_dim), cache->nb[1], 0);
    return ggml_permute(b.ctx, rows, 0, 2, 1, 3);
}

// [head_dim, n_heads, n_rows] as the [head_dim * n_heads, n_rows] that set_rows takes.
static ggml_tensor * as_rows(Build & b, ggml_tensor * x) {
    if (x->nb[2] == x->ne[1] * x->nb[1]) {
        return ggml_reshape_2d(b.ctx, x, x->ne[0] * x->ne[1], x->ne[2]);
    }
    return ggml_view_2d(b.ctx, x, x->ne[0] * x->ne[1], x->ne[2], x->nb[2], 0);
}

void store_kv(Build & b, int il, ggml_tensor * k, ggml_tensor * v, ggml_tensor * cells) {
    k = rotate(b, k, b.kv.rotation_k(il));
    v = rotate(b, v, b.kv.rotation_v(il));
    ggml_build_forward_expand(b.graph, ggml_set_rows(b.ctx, b.kv.k(il), as_rows(b, k), cells));
    ggml_build_forward_expand(b.graph, ggml_set_rows(b.ctx, b.kv.v(il), as_rows(b, v), cells));
}

// q: [head_dim, n_head, n_rows] -> same, over what is stored.
static ggml_tensor * few_or_many(Build & b, int il, ggml_tensor * q) {
    const LayerShape & shape = b.hp.layers[il];
    ggml_tensor * k = cached(b, shape, b.kv.k(il));
    ggml_tensor * v = cached(b, shape, b.kv.v(il));
    ggml_tensor * mask = b.in.masks[b.kv.masks().index(il)];
    ggml_tensor * sinks = b.weights.layers[il].attn.sinks;
    if (sinks == nullptr && attends_few_rows(b, q, k, v)) {
        return few_row_attention(b, q, k, v, mask, shape.attn_scale);
    }
    ggml_tensor * out = ggml_flash_attn_ext(b.ctx, ggml_permute(b.ctx, q, 0, 2, 1, 3), k, v, mask,
                                            shape.attn_scale, 0.0f, 0.0f);
    ggml_prec_set_acc(out, GGML_PREC_F32);
    if (sinks != nullptr) {
        ggml_flash_attn_ext_add_sinks(out, sinks);
    }
    return out;
}

ggml_tensor * attend(Build & b, int il, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v) {
    q = rotate(b, q, b.kv.rotation_k(il));
    ggml_build_forward_expand(b.graph, q);
    // Stored before the read below: ggml runs nodes in the order they were added.
    store_kv(b, il, k, v, b.in.cells);

    ggml_tensor * out = few_or_many(b, il, q);
    out = rotate(b, out, b.kv.rotation_v(il)); // [head_dim, n_head, n_rows]
    return ggml_reshape_2d(b.ctx, out, out->ne[0] * out->ne[1], out->ne[2]);
}

ggml_tensor * self_attention(Build & b, int il, ggml_tensor * x) {
    const LayerShape & shape = b.hp.layers[il];
    const AttentionWeights & w = b.weights.layers[il].attn;
    Projections p = project_qkv(b, il, x, shape.head_dim * shape.n_head);
    ggml_tensor * q = ggml_view_3d(b.ctx, p.q, shape.head_dim, shape.n_head, x->ne[1],
                                   ggml_row_size(p.q->type, shape.head_dim), p.q->nb[1], 0);
    ggml_tensor * k = p.k;
    if (w.q_norm != nullptr) {
        q = rms_norm(b, q, w.q_norm);
        k = rms_norm(b, k, w.k_norm);
    }
    return linear(
        b, w.output,
        attend(b, il, rope(b, il, q, b.in.positions), rope(b, il, k, b.in.positions), p.v));
}

} // namespace dfl
