#include "layers/attention.h"

#include "layers/cpu_ops/cell_attention.h"
#include "layers/linear.h"

namespace dfl {

// Rows of a product as [head_dim, n_head_kv, n_rows].
static ggml_tensor * kv_heads(Build & b, const LayerShape & shape, ggml_tensor * y) {
    const size_t head = shape.head_dim * ggml_element_size(y);
    return ggml_view_3d(b.ctx, y, shape.head_dim, shape.n_head_kv, y->ne[1], head, y->nb[1], 0);
}

std::vector<KeyValue> project_kv(Build & b, const Rows & x) {
    std::vector<const Linear *> weights;
    for (const LayerWeights & layer : b.weights.layers) {
        weights.push_back(&layer.attn.k);
        if (layer.attn.v) {
            weights.push_back(&layer.attn.v);
        }
    }
    const std::vector<ggml_tensor *> products = linears(b, weights, x);
    std::vector<KeyValue> found;
    size_t next = 0;
    for (int il = 0; il < b.hp.n_layer(); ++il) {
        const LayerShape & shape = b.hp.layers[il];
        ggml_tensor * k = kv_heads(b, shape, products[next++]);
        const bool has_v = static_cast<bool>(b.weights.layers[il].attn.v);
        found.push_back({k, has_v ? kv_heads(b, shape, products[next++]) : k});
    }
    return found;
}

Projections project_qkv(Build & b, int il, const Rows & x, int64_t q_width) {
    const LayerShape & shape = b.hp.layers[il];
    const AttentionWeights & w = b.weights.layers[il].attn;
    const int64_t d = shape.head_dim;
    const int64_t n_kv = shape.n_head_kv;
    const int64_t rows = x.n_rows();
    if (!w.qkv) {
        std::vector<const Linear *> weights;
        for (const Linear * weight : {&w.q, &w.k, &w.v}) {
            if (*weight) {
                weights.push_back(weight);
            }
        }
        const std::vector<ggml_tensor *> products = linears(b, weights, x);
        ggml_tensor * k = w.k ? kv_heads(b, shape, products[1]) : nullptr;
        return {products[0], k, w.v ? kv_heads(b, shape, products[2]) : k};
    }
    ggml_tensor * all = linear(b, w.qkv, x); // [q_width + 2 * d * n_kv, n_rows]
    const size_t element = ggml_element_size(all);
    auto heads = [&](int64_t first) {
        return ggml_view_3d(b.ctx, all, d, n_kv, rows, d * element, all->nb[1], first * element);
    };
    ggml_tensor * k = heads(q_width);
    return {ggml_view_2d(b.ctx, all, q_width, rows, all->nb[1], 0), k, heads(q_width + d * n_kv)};
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
static ggml_tensor * cached(Build & b, int il, ggml_tensor * cache) {
    const LayerShape & shape = b.hp.layers[il];
    const int64_t n_kv = b.shape.n_kv[b.kv.group_index(il)];
    ggml_tensor * rows = ggml_view_3d(b.ctx, cache, shape.head_dim, shape.n_head_kv, n_kv,
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

static ggml_tensor * normed_heads(Build & b, ggml_tensor * x, ggml_tensor * weight) {
    return weight != nullptr ? rms_norm(b, x, weight) : x;
}

static void store(Build & b, ggml_tensor * cache, ggml_tensor * x, ggml_tensor * rotation,
                  ggml_tensor * cells) {
    x = as_rows(b, rotate(b, x, rotation));
    ggml_build_forward_expand(b.graph, ggml_set_rows(b.ctx, cache, x, cells));
}

ggml_tensor * row_cells(const Build & b, int il) { return b.in.cells[b.kv.group_index(il)]; }

void store_kv(Build & b, int il, const HeadRows & rows) {
    if (b.kv.attends_on_host(il)) {
        HeadRows stored = rows;
        stored.q = nullptr;
        turn_heads(b, il, stored);
        return;
    }
    ggml_tensor * k = rope(b, il, normed_heads(b, rows.k, rows.k_norm), rows.positions);
    ggml_tensor * v = norms_values(b, il) ? ggml_rms_norm(b.ctx, rows.v, b.hp.eps) : rows.v;
    store(b, b.kv.k(il), k, b.kv.rotation_k(il), rows.cells);
    store(b, b.kv.v(il), v, b.kv.rotation_v(il), rows.cells);
}

// The same by ggml's operations -> [head_dim, n_head, n_rows].
static ggml_tensor * masked_attention(Build & b, int il, const HeadRows & rows) {
    const LayerShape & shape = b.hp.layers[il];
    ggml_tensor * q = rope(b, il, normed_heads(b, rows.q, rows.q_norm), rows.positions);
    q = rotate(b, q, b.kv.rotation_k(il));
    ggml_build_forward_expand(b.graph, q);
    if (rows.k != nullptr) { // before the read below: ggml runs nodes in the order they were added
        store_kv(b, il, rows);
    }
    const int64_t group = b.kv.group_index(il);
    ggml_tensor * mask = b.in.masks[group][b.kv.group(il).masks().index(il)];
    ggml_tensor * out =
        ggml_flash_attn_ext(b.ctx, ggml_permute(b.ctx, q, 0, 2, 1, 3), cached(b, il, b.kv.k(il)),
                            cached(b, il, b.kv.v(il)), mask, shape.attn_scale, 0.0f, 0.0f);
    ggml_prec_set_acc(out, GGML_PREC_F32);
    if (ggml_tensor * sinks = b.weights.layers[il].attn.sinks) {
        ggml_flash_attn_ext_add_sinks(out, sinks);
    }
    return rotate(b, out, b.kv.rotation_v(il));
}

ggml_tensor * attend(Build & b, int il, const HeadRows & rows) {
    ggml_tensor * out = b.kv.attends_on_host(il) ? cell_attention(b, il, turn_heads(b, il, rows))
                                                 : masked_attention(b, il, rows);
    return ggml_reshape_2d(b.ctx, out, out->ne[0] * out->ne[1], out->ne[2]);
}

ggml_tensor * project_output(Build & b, int il, const Rows & attended, ggml_tensor * add) {
    const Linear & output = b.weights.layers[il].attn.output;
    if (b.hp.value_scale == 1.0f) {
        return linear(b, output, attended, add);
    }
    return plus(b, ggml_scale(b.ctx, linear(b, output, attended), b.hp.value_scale), add);
}

ggml_tensor * self_attention(Build & b, int il, const SubLayerInput & in) {
    const LayerShape & shape = b.hp.layers[il];
    const AttentionWeights & w = b.weights.layers[il].attn;
    const Projections p = project_qkv(b, il, in.x, shape.head_dim * shape.n_head);
    ggml_tensor * q = ggml_view_3d(b.ctx, p.q, shape.head_dim, shape.n_head, in.x.n_rows(),
                                   ggml_row_size(p.q->type, shape.head_dim), p.q->nb[1], 0);
    ggml_tensor * attended =
        attend(b, il, {q, p.k, p.v, w.q_norm, w.k_norm, b.in.positions, row_cells(b, il)});
    return project_output(b, il, attended, in.add);
}

} // namespace dfl
