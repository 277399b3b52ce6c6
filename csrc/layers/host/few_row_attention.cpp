#include "layers/host/few_row_attention.h"

#include "cpu/cell_attention.h"

#include <algorithm>

namespace dfl {

namespace {

// dst: the result, then scratch for each thread.
class Attend : public CpuNode {
  public:
    Attend(const cpu::CellAttentionKernel & kernel, float scale) : kernel_(kernel), scale_(scale) {}

    void compute(ggml_tensor * dst, int ith, int nth) override {
        const ggml_tensor *q = dst->src[0], *k = dst->src[1], *v = dst->src[2];
        const ggml_tensor * mask = dst->src[3];
        const int64_t d = q->ne[0], n_head = q->ne[1], n_rows = q->ne[2];
        const int64_t n_cells = k->ne[1], n_head_kv = k->ne[2];
        auto * out = static_cast<float *>(dst->data);
        float * scratch = out + d * n_head * n_rows + ith * kernel_.scratch_size(d, n_cells);

        cpu::CellAttention work;
        work.head_dim = d;
        work.n_group = n_head / n_head_kv;
        work.q_row = q->nb[2] / sizeof(float);
        work.q_head = q->nb[1] / sizeof(float);
        work.k_cell = k->nb[1] / sizeof(uint16_t);
        work.v_cell = v->nb[1] / sizeof(uint16_t);
        work.mask = static_cast<const uint16_t *>(mask->data);
        work.mask_row = mask->nb[1] / sizeof(uint16_t);
        work.n_cells = n_cells;
        work.scale = scale_;
        work.out_row = d * n_head;

        const int64_t n_queries = work.n_group * n_rows;
        const bool is_long = n_queries * n_head_kv * n_cells * d >= LONG;
        const int64_t step = queries_at_once(n_queries * n_head_kv, is_long ? 2 * nth : nth);
        const int64_t parts = (n_queries + step - 1) / step;
        shares_.share_out(parts * n_head_kv, is_long, ith, nth, [&](int64_t part) {
            const int64_t head = part / parts, first = part % parts * step;
            work.q = static_cast<const float *>(q->data) + head * work.n_group * work.q_head;
            work.k = at(k, head);
            work.v = at(v, head);
            work.out = out + head * work.n_group * d;
            kernel_.attend(work, first, std::min(step, n_queries - first), scratch);
        });
    }

  private:
    static const uint16_t * at(const ggml_tensor * cells, int64_t head) {
        return reinterpret_cast<const uint16_t *>(static_cast<const char *>(cells->data) +
                                                  head * cells->nb[2]);
    }

    // Products of a query's value with a key's, from which on parts are worth fetching.
    static constexpr int64_t LONG = 1 << 20;

    // Each call rearranges its keys anew, so few queries are worth it only for an even end.
    static int64_t queries_at_once(int64_t n, int64_t n_calls) {
        constexpr int64_t least = 4;
        return std::clamp<int64_t>((n + n_calls - 1) / n_calls, least, cpu::MAX_QUERIES);
    }

    const cpu::CellAttentionKernel & kernel_;
    float scale_;
};

} // namespace

bool attends_few_rows(const Build & b, const ggml_tensor * q, const ggml_tensor * k,
                      const ggml_tensor * v) {
    // A prefill's many rows are served better by ggml's tiles; more cells, by its split of one row
    // among threads.
    constexpr int64_t most_rows = 64, most_cells = 32768;
    const cpu::CellAttentionKernel * kernel = cpu::cell_attention();
    return b.cpu_nodes.n_threads > 0 && kernel != nullptr && q->ne[0] % kernel->lanes == 0 &&
           k->type == GGML_TYPE_F16 && v->type == GGML_TYPE_F16 && k->ne[1] <= most_cells &&
           (b.shape.kind != GraphKind::APPEND || q->ne[2] <= most_rows);
}

ggml_tensor * few_row_attention(Build & b, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
                                ggml_tensor * mask, float scale) {
    const cpu::CellAttentionKernel & kernel = *cpu::cell_attention();
    const int64_t n = ggml_nelements(q);
    const int64_t scratch = b.cpu_nodes.n_threads * kernel.scratch_size(q->ne[0], k->ne[1]);
    ggml_tensor * all = add_cpu_node(b, GGML_TYPE_F32, n + scratch, 1, {q, k, v, mask},
                                     std::make_unique<Attend>(kernel, scale));
    return ggml_view_3d(b.ctx, all, q->ne[0], q->ne[1], q->ne[2], q->ne[0] * sizeof(float),
                        q->ne[0] * q->ne[1] * sizeof(float), 0);
}

} // namespace dfl
