#include "layers/cpu_ops/head_rows.h"

#include "cpu/rows/hadamard.h"
#include "cpu/rows/row_kernel.h"

#include <cstring>

namespace dfl {

ggml_tensor * rope(GraphContext & g, int il, ggml_tensor * x, ggml_tensor * positions) {
    const RopeShape & r = g.hp.layers[il].rope;
    ggml_tensor * factors = g.weights.layers[il].attn.rope_factors;
    if (positions->ne[0] == x->ne[2]) {
        return ggml_rope_ext(g.ctx, x, positions, factors, r.n_dims, r.type, r.n_ctx_orig,
                             r.freq_base, r.freq_scale, r.ext_factor, r.attn_factor, r.beta_fast,
                             r.beta_slow);
    }
    int sections[4] = {r.sections[0], r.sections[1], r.sections[2], r.sections[3]};
    return ggml_rope_multi(g.ctx, x, positions, factors, r.n_dims, sections, r.type, r.n_ctx_orig,
                           r.freq_base, r.freq_scale, r.ext_factor, r.attn_factor, r.beta_fast,
                           r.beta_slow);
}

static bool turns_pairs(const RopeShape & rope) { return rope.type == GGML_ROPE_TYPE_NORMAL; }

namespace {

// Node that writes pairs (1, 0), which ggml's rope, of any variant, turns into cosines and sines.
class Units : public CpuNode {
  public:
    explicit Units(bool pairs) : pairs_(pairs) {}

    void compute(ggml_tensor * dst, int ith, int nth) override {
        const int64_t n = dst->ne[0], rows = dst->ne[1];
        auto * to = static_cast<float *>(dst->data);
        for (int64_t row = ith; row < rows; row += nth) {
            for (int64_t i = 0; i < n; ++i) {
                to[row * n + i] = (pairs_ ? i % 2 == 0 : i < n / 2) ? 1.0f : 0.0f;
            }
        }
    }

  private:
    bool pairs_;
};

// Node of rotate_heads(). src: cosines and sines; if keys are stored, also k, v, cells, K cache and
// V cache; then q, if any. dst: the queries.
class RotateHeads : public CpuNode {
  public:
    RotateHeads(const GraphContext & g, int il, const HeadRows & rows)
        : q_norm_(rows.q_norm), k_norm_(rows.k_norm), eps_(g.hp.eps),
          pairs_(turns_pairs(g.hp.layers[il].rope)), block_k_(block_of(g.kv.rotation_k(il))),
          block_v_(block_of(g.kv.rotation_v(il))), norms_values_(norms_values(g, il)),
          stores_(rows.k != nullptr) {}

    void compute(ggml_tensor * dst, int ith, int nth) override {
        const ggml_tensor * q = dst->src[stores_ ? 6 : 1];
        const int64_t n_q = q != nullptr ? q->ne[1] : 0;
        const int64_t heads = n_q + (stores_ ? 2 * dst->src[1]->ne[1] : 0);
        const int64_t n = heads * dst->src[0]->ne[2];
        for (int64_t i = n * ith / nth; i < n * (ith + 1) / nth; ++i) {
            const int64_t row = i / heads, head = i % heads;
            if (head < n_q) {
                auto * to = static_cast<float *>(dst->data) + (row * n_q + head) * q->ne[0];
                rotate(dst, head_of(q, head, row), q->ne[0], q_norm_, row, to);
                rotate(to, q->ne[0], block_k_);
            } else {
                store(dst, row, head - n_q);
            }
        }
    }

  private:
    static const float * head_of(const ggml_tensor * x, int64_t head, int64_t row) {
        return reinterpret_cast<const float *>(static_cast<const char *>(x->data) +
                                               head * x->nb[1] + row * x->nb[2]);
    }

    void rotate(const ggml_tensor * dst, const float * x, int64_t d, const ggml_tensor * norm,
                int64_t row, float * to) const {
        const ggml_tensor * rotated = dst->src[0];
        const float * weight = norm != nullptr ? static_cast<const float *>(norm->data) : nullptr;
        const auto * angles = reinterpret_cast<const float *>(
            static_cast<const char *>(rotated->data) + row * rotated->nb[2]);
        kernel_.rotate({x, d, weight, eps_, angles, rotated->ne[0], pairs_}, to);
    }

    // Stores one head of a row: heads below n_head_kv are keys, the next n_head_kv are values.
    void store(const ggml_tensor * dst, int64_t row, int64_t head) const {
        const ggml_tensor *k = dst->src[1], *v = dst->src[2];
        const int64_t d = k->ne[0], n = k->ne[1];
        const bool is_key = head < n;
        const ggml_tensor * cache = dst->src[is_key ? 4 : 5];
        const int64_t cell = static_cast<const int64_t *>(dst->src[3]->data)[row];
        char * to = static_cast<char *>(cache->data) + cell * cache->nb[1] +
                    ggml_row_size(cache->type, head % n * d);
        float values[cpu::MAX_ROTATED_HEAD];
        if (is_key) {
            rotate(dst, head_of(k, head, row), d, k_norm_, row, values);
        } else if (norms_values_) {
            kernel_.norm(head_of(v, head - n, row), d, ones().data(), eps_, values);
        } else {
            std::copy_n(head_of(v, head - n, row), d, values);
        }
        rotate(values, d, is_key ? block_k_ : block_v_);
        write(values, d, cache->type, to);
    }

    static void rotate(float * x, int64_t d, int64_t block) {
        if (block > 0) {
            cpu::hadamard(x, d, block);
        }
    }

    void write(const float * x, int64_t d, ggml_type type, char * to) const {
        if (type == GGML_TYPE_F32) {
            std::memcpy(to, x, d * sizeof(float));
        } else if (type == GGML_TYPE_F16) {
            kernel_.to_half(x, d, reinterpret_cast<uint16_t *>(to));
        } else {
            ggml_get_type_traits(type)->from_float_ref(x, to, d);
        }
    }

    static const std::vector<float> & ones() {
        static const std::vector<float> values(cpu::MAX_ROTATED_HEAD, 1.0f);
        return values;
    }

    static int64_t block_of(const ggml_tensor * rotation) {
        return rotation != nullptr ? rotation->ne[0] : 0;
    }

    const cpu::RowKernel & kernel_ = *cpu::row_kernel();
    const ggml_tensor * q_norm_;
    const ggml_tensor * k_norm_;
    float eps_;
    bool pairs_;
    int64_t block_k_, block_v_; // values of a Hadamard-rotated block; 0: not rotated
    bool norms_values_, stores_;
};

} // namespace

// Returns cosines and sines at the positions, [n_dims, 1, n_rows]; layers of equal rope share them.
static ggml_tensor * rotated_units(GraphContext & g, int il, ggml_tensor * positions,
                                   int64_t n_rows) {
    const RopeShape & rope_shape = g.hp.layers[il].rope;
    for (const RotatedUnits & units : g.rotated_units) {
        if (units.positions == positions && units.rope == rope_shape) {
            return units.units;
        }
    }
    const int64_t n = rope_shape.n_dims;
    ggml_tensor * units = add_cpu_node(g, GGML_TYPE_F32, n, n_rows, {positions},
                                       std::make_unique<Units>(turns_pairs(rope_shape)));
    units = rope(g, il, ggml_reshape_3d(g.ctx, units, n, 1, n_rows), positions);
    g.rotated_units.push_back({rope_shape, positions, units});
    return units;
}

bool norms_values(const GraphContext & g, int il) {
    const AttentionWeights & w = g.weights.layers[il].attn;
    return g.hp.layers[il].norms_values ||
           (!w.v && !w.qkv); // if V has no weights, v is the K projection
}

ggml_tensor * rotate_heads(GraphContext & g, int il, const HeadRows & rows) {
    const int64_t n_rows = (rows.k != nullptr ? rows.k : rows.q)->ne[2];
    std::vector<ggml_tensor *> src = {rotated_units(g, il, rows.positions, n_rows)};
    if (rows.k != nullptr) {
        src.insert(src.end(), {rows.k, rows.v, rows.cells, g.kv.k(il), g.kv.v(il)});
    }
    auto work = std::make_unique<RotateHeads>(g, il, rows);
    if (rows.q == nullptr) {
        ggml_build_forward_expand(g.graph,
                                  add_cpu_node(g, GGML_TYPE_F32, 1, 1, src, std::move(work)));
        return nullptr;
    }
    src.push_back(rows.q);
    const int64_t d = rows.q->ne[0], n_head = rows.q->ne[1];
    ggml_tensor * q = add_cpu_node(g, GGML_TYPE_F32, d * n_head, n_rows, src, std::move(work));
    ggml_build_forward_expand(g.graph, q);
    return ggml_reshape_3d(g.ctx, q, d, n_head, n_rows);
}

} // namespace dfl
