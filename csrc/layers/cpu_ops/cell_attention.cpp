#include "layers/cpu_ops/cell_attention.h"

#include "cpu/attention/cell_attention.h"
#include "cpu/rows/hadamard.h"
#include "dflash.h"

#include <algorithm>

namespace dfl {

namespace {

// CPU node of attention. src: Q, K cache, V cache. dst: result, thread scratch, partial results.
class Attend : public CpuNode {
  public:
    Attend(const GraphContext & g, int il, const std::vector<VisibleRows> & visible)
        : shape_(g.hp.layers[il]), sinks_(g.weights.layers[il].attn.sinks), visible_(visible),
          rotation_(g.kv.rotation_v(il) != nullptr ? g.kv.rotation_v(il)->ne[0] : 0),
          n_threads_(g.cpu_nodes.max_threads), n_rows_(g.shape.n_rows),
          merged_(shape_.n_head_kv * g.kv.n_sequences()), plans_(n_threads_) {
        // The kernel needs scratch for nodes of a tree, whose cells are scattered.
        const int64_t n_pending =
            g.shape.kind == GraphKind::VERIFY ? std::min<int64_t>(n_rows_, DFL_MAX_VERIFY) : 0;
        scratch_ = kernel_.scratch_size(shape_.head_dim, n_pending);
        const int64_t n_kv = g.shape.n_kv[g.kv.group_index(il)];
        if (n_kv > cpu::CELL_SEGMENT) {
            // n_kv visible cells may touch two segments more than they would fill, as they may
            // begin and end within a segment.
            const int64_t n_segments = n_kv / cpu::CELL_SEGMENT + 2;
            n_parts_ = n_segments * std::min<int64_t>(n_group() * n_rows_, cpu::MAX_QUERIES);
        }
    }

    int64_t result_size() const { return shape_.head_dim * shape_.n_head * n_rows_; }
    int64_t size() const {
        return result_size() + n_threads_ * scratch_ + shape_.n_head_kv * n_parts_ * part_size();
    }

    void compute(ggml_tensor * dst, int ith, int nth) override {
        const Plan & plan = make_plan(plans_[ith], dst, nth);
        float * scratch = static_cast<float *>(dst->data) + result_size() + ith * scratch_;
        if (ith == 0) { // padding rows see no cell: their result is 0
            const int64_t n = visible_.back().first + visible_.back().n,
                          width = result_size() / n_rows_;
            std::fill_n(static_cast<float *>(dst->data) + n * width, (n_rows_ - n) * width, 0.0f);
        }
        size_t at = 0;
        share_out(plan.n_parts, plan.is_long, ith, nth, [&](int64_t part) {
            while (part < plan.shares[at].first_part) {
                --at;
            }
            while (at + 1 < plan.shares.size() && part >= plan.shares[at + 1].first_part) {
                ++at;
            }
            const Share & share = plan.shares[at];
            if (share.splits) {
                attend_segment(dst, share, at, part - share.first_part, scratch);
            } else {
                attend_part(dst, share, at, part - share.first_part, scratch);
            }
        });
    }

  private:
    // Division of a sequence among threads: by K/V head and segment of visible cells, or by
    // queries.
    struct Share {
        int64_t first_part;
        // Number of cell segments of each K/V head if `splits`, else of groups of queries.
        int64_t n;
        int64_t first_segment;
        bool splits;
        int64_t room; // index of the sequence's first partial result within a K/V head
    };
    struct Plan {
        std::vector<Share> shares;
        int64_t n_parts;
        bool is_long;
    };

    // Divides attention into parts of queries or of cell segments. Each thread makes the same plan.
    const Plan & make_plan(Plan & plan, const ggml_tensor * dst, int64_t nth) const {
        plan.shares.clear();
        plan.n_parts = 0;
        int64_t room = 0, products = 0;
        bool any_splits = false;
        // Threads take whole sequences if there are many, and share each sequence otherwise.
        const bool by_sequence = static_cast<int64_t>(visible_.size()) >= 4 * nth;
        const int64_t n_sharing = by_sequence ? 1 : nth;
        for (const VisibleRows & rows : visible_) {
            const int64_t n_queries = n_group() * rows.n;
            const cpu::SegmentRange range =
                cpu::visible_segments(work_of(dst, rows, 0), 0, n_queries);
            const int64_t n_segments = range.end - range.first, n_needed = n_segments * n_queries;
            // Heads are divided into segments, which differ in size, only if there are few queries.
            const bool has_few_queries = n_queries <= cpu::MAX_QUERIES &&
                                         n_queries * shape_.n_head_kv < nth * cpu::MAX_QUERIES;
            const bool splits = n_segments > 1 && has_few_queries && room + n_needed <= n_parts_;
            const int64_t size = n_queries * shape_.n_head_kv * shape_.head_dim;
            const bool is_long = size * n_stored(rows.cells) >= LONG;
            const int64_t n = splits ? n_segments : parts_for(n_queries, n_sharing, is_long);
            plan.shares.push_back({plan.n_parts, n, range.first, splits, room});
            plan.n_parts += splits ? n * shape_.n_head_kv : n;
            room += splits ? n_needed : 0;
            products += size * n_stored(rows.cells);
            any_splits = any_splits || splits;
        }
        plan.is_long = any_splits || products >= LONG;
        return plan;
    }

    // Computes a segment of a K/V head; the last thread to finish merges all segments of the head.
    void attend_segment(ggml_tensor * dst, const Share & share, size_t index, int64_t part,
                        float * scratch) {
        const VisibleRows & rows = visible_[index];
        const int64_t head = part % shape_.n_head_kv, segment = part / shape_.n_head_kv;
        const int64_t n_queries = n_group() * rows.n, segment_size = n_queries * part_size();
        float * of_head =
            static_cast<float *>(dst->data) + result_size() + n_threads_ * scratch_ +
            (share.room * shape_.n_head_kv + head * share.n * n_queries) * part_size();
        const cpu::CellAttention work = work_of(dst, rows, head);
        kernel_.segment(work, 0, n_queries, share.first_segment + segment,
                        of_head + segment * segment_size, scratch);
        std::atomic<int64_t> & merged = merged_[index * shape_.n_head_kv + head];
        if (merged.fetch_add(1, std::memory_order_acq_rel) + 1 < share.n) {
            return;
        }
        merged.store(0, std::memory_order_relaxed);
        for (int64_t i = 0; i < n_queries; ++i) {
            kernel_.merge(work, i, of_head + i * part_size(), share.n, segment_size, scratch);
            rotate_back(work, i);
        }
    }

    void attend_part(ggml_tensor * dst, const Share & share, size_t index, int64_t part,
                     float * scratch) const {
        const VisibleRows & rows = visible_[index];
        const int64_t n_queries = n_group() * rows.n, n = n_queries * shape_.n_head_kv;
        // Later rows see more cells and come first, so that the part that ends last is short.
        const int64_t end = n * (share.n - part) / share.n;
        int64_t at = n * (share.n - part - 1) / share.n;
        cpu::CellAttention work = work_of(dst, rows, at / n_queries), next;
        while (at < end) {
            const int64_t first = at % n_queries;
            const int64_t here = std::min({end - at, n_queries - first, cpu::MAX_QUERIES});
            at += here;
            if (at < end) {
                next = work_of(dst, rows, at / n_queries);
                work.next = &next;
            } else if (share.n == 1 && index + 1 < visible_.size()) {
                // Prefetches the next sequence, which this thread probably computes next.
                next = work_of(dst, visible_[index + 1], 0);
                work.next = &next;
            }
            kernel_.attend(work, first, here, scratch);
            for (int64_t i = first; i < first + here; ++i) {
                rotate_back(work, i);
            }
            work = next;
            work.is_fetched = true;
        }
    }

    int64_t n_group() const { return shape_.n_head / shape_.n_head_kv; }
    // Returns the number of positions from the first to the last cell that a sequence has.
    static int64_t n_stored(const cpu::VisibleCells & visible) {
        const auto & spans = visible.spans;
        return spans.empty() ? 1 : spans.back().position + spans.back().n - spans.front().position;
    }
    int64_t part_size() const { return kernel_.part_size(shape_.head_dim); }

    cpu::CellAttention work_of(const ggml_tensor * dst, const VisibleRows & rows,
                               int64_t head) const {
        const ggml_tensor * q = dst->src[0];
        const int64_t d = shape_.head_dim;
        cpu::CellAttention work;
        work.head_dim = d;
        work.n_group = n_group();
        work.q_row = q->nb[2] / sizeof(float);
        work.q_head = q->nb[1] / sizeof(float);
        work.q = static_cast<const float *>(q->data) + rows.first * work.q_row +
                 head * n_group() * work.q_head;
        const auto cached = [&](const ggml_tensor * cache) {
            return cpu::CellRows{static_cast<const char *>(cache->data) +
                                     ggml_row_size(cache->type, head * d),
                                 cache->nb[1], cache->type};
        };
        work.k = cached(dst->src[1]);
        work.v = cached(dst->src[2]);
        work.visible = &rows.cells;
        work.window = shape_.window;
        work.causal = shape_.causal;
        work.scale = shape_.attn_scale;
        work.sinks = sinks_ != nullptr ? static_cast<const float *>(sinks_->data) + head * n_group()
                                       : nullptr;
        work.out_row = d * shape_.n_head;
        work.out =
            static_cast<float *>(dst->data) + rows.first * work.out_row + head * n_group() * d;
        return work;
    }

    void rotate_back(const cpu::CellAttention & work, int64_t query) const {
        if (rotation_ > 0) {
            cpu::hadamard(work.out + query / n_group() * work.out_row +
                              query % n_group() * shape_.head_dim,
                          shape_.head_dim, rotation_);
        }
    }

    // Multiplications of a pass's attention from which on idle threads take over work of others.
    static constexpr int64_t LONG = 1 << 22;

    // Returns the number of parts of queries: few, as each part rearranges its heads' keys again.
    int64_t parts_for(int64_t n_queries, int64_t nth, bool is_long) const {
        const int64_t n = n_queries * shape_.n_head_kv;
        const int64_t rounds = (n + cpu::MAX_QUERIES * nth - 1) / (cpu::MAX_QUERIES * nth);
        return nth * std::max<int64_t>(rounds, is_long ? 2 : 1);
    }

    const cpu::CellAttentionKernel & kernel_ = *cpu::cell_attention();
    LayerShape shape_;
    const ggml_tensor * sinks_;
    const std::vector<VisibleRows> & visible_;
    int64_t rotation_; // values per Hadamard-rotated block of V; 0: V is not rotated
    int64_t n_threads_, n_rows_;
    int64_t scratch_ = 0;
    int64_t n_parts_ = 0; // partial results that dst has room for, for each K/V head
    std::vector<std::atomic<int64_t>> merged_; // segments done, counted by sequence and K/V head
    std::vector<Plan> plans_;
};

} // namespace

ggml_tensor * cell_attention(GraphContext & g, int il, ggml_tensor * q) {
    auto work = std::make_unique<Attend>(g, il, g.kv.group(il).visible());
    const int64_t size = work->size();
    ggml_tensor * all =
        add_cpu_node(g, GGML_TYPE_F32, size, 1, {q, g.kv.k(il), g.kv.v(il)}, std::move(work));
    return ggml_view_3d(g.ctx, all, q->ne[0], q->ne[1], q->ne[2], q->ne[0] * sizeof(float),
                        q->ne[0] * q->ne[1] * sizeof(float), 0);
}

} // namespace dfl
