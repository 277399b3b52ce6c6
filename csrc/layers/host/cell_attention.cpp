#include "layers/host/cell_attention.h"

#include "cpu/cell_attention.h"
#include "cpu/hadamard.h"

#include <algorithm>

namespace dfl {

namespace {

// src: q, the caches of K and V. dst: the result, scratch for each thread, and what segments leave
// of each query where there is room for that.
class Attend : public CpuNode {
  public:
    Attend(const Build & b, int il, const cpu::SeenCells & seen)
        : shape_(b.hp.layers[il]), sinks_(b.weights.layers[il].attn.sinks), seen_(seen),
          rotation_(b.kv.rotation_v(il) != nullptr ? b.kv.rotation_v(il)->ne[0] : 0),
          n_threads_(b.cpu_nodes.most_threads), n_rows_(b.shape.n_rows), merged_(shape_.n_head_kv) {
        // Rows of a verify may be the nodes of a tree.
        const int64_t n_open = b.shape.kind == GraphKind::VERIFY ? n_rows_ : 0;
        scratch_ = kernel_.scratch_size(shape_.head_dim, n_open);
        const int64_t n_segments = b.shape.n_kv / cpu::CELL_SEGMENT + 2; // begun ones, too
        if (n_queries() <= cpu::MAX_QUERIES && b.shape.n_kv > cpu::CELL_SEGMENT) {
            n_parts_ = n_segments;
        }
    }

    int64_t result_size() const { return shape_.head_dim * shape_.n_head * n_rows_; }
    // Floats of dst.
    int64_t size() const {
        return result_size() + n_threads_ * scratch_ + shape_.n_head_kv * n_parts_ * segment_size();
    }

    void compute(ggml_tensor * dst, int ith, int nth) override {
        auto * out = static_cast<float *>(dst->data);
        float * scratch = out + result_size() + ith * scratch_;
        float * parts = out + result_size() + n_threads_ * scratch_;
        cpu::CellAttention work = work_of(dst, 0);
        const cpu::SegmentRange range = cpu::seen_segments(work, 0, n_queries());
        const int64_t n_segments = range.end - range.first;
        const bool splits = n_segments > 1 && n_segments <= n_parts_;
        const bool is_long = n_queries() * shape_.n_head_kv * shape_.head_dim * n_seen() >= LONG;
        if (splits) {
            // The last who ends a segment of a head has all of its parts.
            shares_.share_out(n_segments * shape_.n_head_kv, true, ith, nth, [&](int64_t part) {
                const int64_t head = part % shape_.n_head_kv, segment = part / shape_.n_head_kv;
                float * of_head = parts + head * n_parts_ * segment_size();
                work = work_of(dst, head);
                kernel_.segment(work, 0, n_queries(), range.first + segment,
                                of_head + segment * segment_size(), scratch);
                if (merged_[head].fetch_add(1, std::memory_order_acq_rel) + 1 < n_segments) {
                    return;
                }
                merged_[head].store(0, std::memory_order_relaxed); // for the next run
                for (int64_t i = 0; i < n_queries(); ++i) {
                    kernel_.merge(work, i, of_head + i * kernel_.part_size(shape_.head_dim),
                                  n_segments, segment_size(), scratch);
                    turn_back(work, i);
                }
            });
            return;
        }
        const int64_t n = n_queries() * shape_.n_head_kv, n_parts = parts_for(nth, is_long);
        shares_.share_out(n_parts, is_long, ith, nth, [&](int64_t part) {
            // Later rows see more: who comes last should have little to do.
            const int64_t end = n * (n_parts - part) / n_parts;
            for (int64_t at = n * (n_parts - part - 1) / n_parts; at < end;) {
                const int64_t first = at % n_queries();
                const int64_t here = std::min({end - at, n_queries() - first, cpu::MAX_QUERIES});
                work = work_of(dst, at / n_queries());
                kernel_.attend(work, first, here, scratch);
                for (int64_t i = first; i < first + here; ++i) {
                    turn_back(work, i);
                }
                at += here;
            }
        });
    }

  private:
    int64_t n_group() const { return shape_.n_head / shape_.n_head_kv; }
    // Of one K/V head.
    int64_t n_queries() const { return n_group() * n_rows_; }
    // Positions that are stored.
    int64_t n_seen() const {
        const auto & spans = seen_.spans;
        return spans.empty() ? 1 : spans.back().position + spans.back().n - spans.front().position;
    }
    int64_t segment_size() const { return n_queries() * kernel_.part_size(shape_.head_dim); }

    cpu::CellAttention work_of(const ggml_tensor * dst, int64_t head) const {
        const ggml_tensor * q = dst->src[0];
        const int64_t d = shape_.head_dim;
        cpu::CellAttention work;
        work.head_dim = d;
        work.n_group = n_group();
        work.q_row = q->nb[2] / sizeof(float);
        work.q_head = q->nb[1] / sizeof(float);
        work.q = static_cast<const float *>(q->data) + head * n_group() * work.q_head;
        const auto rows = [&](const ggml_tensor * cache) {
            return cpu::CellRows{static_cast<const char *>(cache->data) +
                                     ggml_row_size(cache->type, head * d),
                                 cache->nb[1], cache->type};
        };
        work.k = rows(dst->src[1]);
        work.v = rows(dst->src[2]);
        work.seen = &seen_;
        work.window = shape_.window;
        work.causal = shape_.causal;
        work.scale = shape_.attn_scale;
        work.sinks = sinks_ != nullptr ? static_cast<const float *>(sinks_->data) + head * n_group()
                                       : nullptr;
        work.out = static_cast<float *>(dst->data) + head * n_group() * d;
        work.out_row = d * shape_.n_head;
        return work;
    }

    void turn_back(const cpu::CellAttention & work, int64_t query) const {
        if (rotation_ > 0) {
            cpu::hadamard(work.out + query / n_group() * work.out_row +
                              query % n_group() * shape_.head_dim,
                          shape_.head_dim, rotation_);
        }
    }

    // Products of a query's value with a key's, from which on parts are worth fetching.
    static constexpr int64_t LONG = 1 << 22;

    // Parts that the queries of all heads are cut into, one head after another: each part
    // rearranges the keys of its heads anew, which takes as long as some queries, so there are few
    // of them.
    int64_t parts_for(int64_t nth, bool is_long) const {
        const int64_t n = n_queries() * shape_.n_head_kv;
        const int64_t rounds = (n + cpu::MAX_QUERIES * nth - 1) / (cpu::MAX_QUERIES * nth);
        return nth * std::max<int64_t>(rounds, is_long ? 2 : 1);
    }

    const cpu::CellAttentionKernel & kernel_ = *cpu::cell_attention();
    LayerShape shape_;
    const ggml_tensor * sinks_;
    const cpu::SeenCells & seen_;
    int64_t rotation_; // values of a block of V that were rotated; 0: none
    int64_t n_threads_, n_rows_;
    int64_t scratch_ = 0;                      // floats of a thread
    int64_t n_parts_ = 0;                      // segments there is room for
    std::vector<std::atomic<int64_t>> merged_; // segments of a head that are done
};

} // namespace

ggml_tensor * cell_attention(Build & b, int il, ggml_tensor * q) {
    auto work = std::make_unique<Attend>(b, il, b.kv.seen());
    const int64_t size = work->size();
    ggml_tensor * all =
        add_cpu_node(b, GGML_TYPE_F32, size, 1, {q, b.kv.k(il), b.kv.v(il)}, std::move(work));
    return ggml_view_3d(b.ctx, all, q->ne[0], q->ne[1], q->ne[2], q->ne[0] * sizeof(float),
                        q->ne[0] * q->ne[1] * sizeof(float), 0);
}

} // namespace dfl
