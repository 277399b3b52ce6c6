#include "layers/attention.h"

#include "layers/cpu_ops/cell_attention.h"
#include "layers/linear.h"

namespace dfl {

static ggml_tensor * kv_heads(GraphContext & g, const LayerShape & shape, ggml_tensor * y) {
    const size_t head = shape.head_dim * ggml_element_size(y);
    return ggml_view_3d(g.ctx, y, shape.head_dim, shape.n_head_kv, y->ne[1], head, y->nb[1], 0);
}

std::vector<KeyValue> project_kv(GraphContext & g, const Rows & x) {
    std::vector<const Linear *> weights;
    for (const LayerWeights & layer : g.weights.layers) {
        weights.push_back(&layer.attn.k);
        if (layer.attn.v) {
            weights.push_back(&layer.attn.v);
        }
    }
    const std::vector<ggml_tensor *> products = linears(g, weights, x);
    std::vector<KeyValue> projection;
    size_t next = 0;
    for (int il = 0; il < g.hp.n_layer(); ++il) {
        const LayerShape & shape = g.hp.layers[il];
        ggml_tensor * k = kv_heads(g, shape, products[next++]);
        const bool has_v = static_cast<bool>(g.weights.layers[il].attn.v);
        projection.push_back({k, has_v ? kv_heads(g, shape, products[next++]) : k});
    }
    return projection;
}

Projections project_qkv(GraphContext & g, int il, const Rows & x, int64_t q_width) {
    const LayerShape & shape = g.hp.layers[il];
    const AttentionWeights & w = g.weights.layers[il].attn;
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
        const std::vector<ggml_tensor *> products = linears(g, weights, x);
        ggml_tensor * k = w.k ? kv_heads(g, shape, products[1]) : nullptr;
        return {products[0], k, w.v ? kv_heads(g, shape, products[2]) : k};
    }
    ggml_tensor * all = linear(g, w.qkv, x);
    const size_t element = ggml_element_size(all);
    auto heads = [&](int64_t first) {
        return ggml_view_3d(g.ctx, all, d, n_kv, rows, d * element, all->nb[1], first * element);
    };
    ggml_tensor * k = heads(q_width);
    return {ggml_view_2d(g.ctx, all, q_width, rows, all->nb[1], 0), k, heads(q_width + d * n_kv)};
}

// Multiplies each block of head values with a Hadamard matrix, which is its own inverse.
static ggml_tensor * rotate(GraphContext & g, ggml_tensor * x, ggml_tensor * rotation) {
    if (rotation == nullptr) {
        return x;
    }
    if (!ggml_is_contiguous(x)) {
        x = ggml_cont(g.ctx, x);
    }
    ggml_tensor * blocks =
        ggml_reshape_2d(g.ctx, x, rotation->ne[0], ggml_nelements(x) / rotation->ne[0]);
    ggml_tensor * rotated = ggml_mul_mat(g.ctx, rotation, blocks);
    ggml_mul_mat_set_hint(rotated, GGML_HINT_SRC0_IS_HADAMARD);
    return ggml_reshape_4d(g.ctx, rotated, x->ne[0], x->ne[1], x->ne[2], x->ne[3]);
}

// Views the first n_kv cells of a K or V cache tensor as [head_dim, n_kv, n_head_kv].
static ggml_tensor * cached(GraphContext & g, int il, ggml_tensor * cache) {
    const LayerShape & shape = g.hp.layers[il];
    const int64_t n_kv = g.shape.n_kv[g.kv.group_index(il)];
    ggml_tensor * rows = ggml_view_3d(g.ctx, cache, shape.head_dim, shape.n_head_kv, n_kv,
                                      ggml_row_size(cache->type, shape.head_dim), cache->nb[1], 0);
    return ggml_permute(g.ctx, rows, 0, 2, 1, 3);
}

// Views heads [head_dim, n_heads, n_rows] as rows [head_dim * n_heads, n_rows] for ggml_set_rows().
static ggml_tensor * as_rows(GraphContext & g, ggml_tensor * x) {
    if (x->nb[2] == x->ne[1] * x->nb[1]) {
        return ggml_reshape_2d(g.ctx, x, x->ne[0] * x->ne[1], x->ne[2]);
    }
    return ggml_view_2d(g.ctx, x, x->ne[0] * x->ne[1], x->ne[2], x->nb[2], 0);
}

static ggml_tensor * normed_heads(GraphContext & g, ggml_tensor * x, ggml_tensor * weight) {
    return weight != nullptr ? rms_norm(g, x, weight) : x;
}

static void store(GraphContext & g, ggml_tensor * cache, ggml_tensor * x, ggml_tensor * rotation,
                  ggml_tensor * cells) {
    x = as_rows(g, rotate(g, x, rotation));
    ggml_build_forward_expand(g.graph, ggml_set_rows(g.ctx, cache, x, cells));
}

ggml_tensor * row_cells(const GraphContext & g, int il) { return g.in.cells[g.kv.group_index(il)]; }

void store_kv(GraphContext & g, int il, const HeadRows & rows) {
    if (g.kv.attends_on_host(il)) {
        HeadRows stored = rows;
        stored.q = nullptr;
        rotate_heads(g, il, stored);
        return;
    }
    ggml_tensor * k = rope(g, il, normed_heads(g, rows.k, rows.k_norm), rows.positions);
    ggml_tensor * v = norms_values(g, il) ? ggml_rms_norm(g.ctx, rows.v, g.hp.eps) : rows.v;
    store(g, g.kv.k(il), k, g.kv.rotation_k(il), rows.cells);
    store(g, g.kv.v(il), v, g.kv.rotation_v(il), rows.cells);
}

// Returns attention by ggml's operations with a cell mask, [head_dim, n_head, n_rows].
static ggml_tensor * masked_attention(GraphContext & g, int il, const HeadRows & rows) {
    const LayerShape & shape = g.hp.layers[il];
    ggml_tensor * q = rope(g, il, normed_heads(g, rows.q, rows.q_norm), rows.positions);
    q = rotate(g, q, g.kv.rotation_k(il));
    ggml_build_forward_expand(g.graph, q);
    // ggml runs nodes in the order they were added: K and V must be stored before attention reads.
    if (rows.k != nullptr) {
        store_kv(g, il, rows);
    }
    const int64_t group = g.kv.group_index(il);
    ggml_tensor * mask = g.in.masks[group][g.kv.group(il).masks().index(il)];
    ggml_tensor * out =
        ggml_flash_attn_ext(g.ctx, ggml_permute(g.ctx, q, 0, 2, 1, 3), cached(g, il, g.kv.k(il)),
                            cached(g, il, g.kv.v(il)), mask, shape.attn_scale, 0.0f, 0.0f);
    ggml_prec_set_acc(out, GGML_PREC_F32);
    if (ggml_tensor * sinks = g.weights.layers[il].attn.sinks) {
        ggml_flash_attn_ext_add_sinks(out, sinks);
    }
    return rotate(g, out, g.kv.rotation_v(il));
}

ggml_tensor * attend(GraphContext & g, int il, const HeadRows & rows) {
    ggml_tensor * out = g.kv.attends_on_host(il) ? cell_attention(g, il, rotate_heads(g, il, rows))
                                                 : masked_attention(g, il, rows);
    return ggml_reshape_2d(g.ctx, out, out->ne[0] * out->ne[1], out->ne[2]);
}

ggml_tensor * project_output(GraphContext & g, int il, const Rows & attended, ggml_tensor * add) {
    const Linear & output = g.weights.layers[il].attn.output;
    if (g.hp.value_scale == 1.0f) {
        return linear(g, output, attended, add);
    }
    return plus(g, ggml_scale(g.ctx, linear(g, output, attended), g.hp.value_scale), add);
}

ggml_tensor * self_attention(GraphContext & g, int il, const SubLayerInput & in) {
    const LayerShape & shape = g.hp.layers[il];
    const AttentionWeights & w = g.weights.layers[il].attn;
    const Projections p = project_qkv(g, il, in.x, shape.head_dim * shape.n_head);
    ggml_tensor * q = ggml_view_3d(g.ctx, p.q, shape.head_dim, shape.n_head, in.x.n_rows(),
                                   ggml_row_size(p.q->type, shape.head_dim), p.q->nb[1], 0);
    ggml_tensor * attended =
        attend(g, il, {q, p.k, p.v, w.q_norm, w.k_norm, g.in.positions, row_cells(g, il)});
    return project_output(g, il, attended, in.add);
}

ggml_tensor * gated_attention(GraphContext & g, int il, const SubLayerInput & in) {
    const LayerShape & shape = g.hp.layers[il];
    const AttentionWeights & w = g.weights.layers[il].attn;
    const int64_t d = shape.head_dim;
    Projections p = project_qkv(g, il, in.x, 2 * d * shape.n_head);
    const size_t e = ggml_element_size(p.q);
    auto half = [&](int64_t first) {
        return ggml_view_3d(g.ctx, p.q, d, shape.n_head, in.x.n_rows(), 2 * d * e, p.q->nb[1],
                            first * e);
    };
    ggml_tensor * attended =
        attend(g, il, {half(0), p.k, p.v, w.q_norm, w.k_norm, g.in.positions, row_cells(g, il)});
    return project_output(g, il, gated_heads(attended, half(d)), in.add);
}

} // namespace dfl
