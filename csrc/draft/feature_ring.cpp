#include "draft/feature_ring.h"

#include "layers/cpu_ops/row_copies.h"

#include <algorithm>

namespace dfl {

void FeatureRing::allocate(int64_t n_rows) {
    int64_t n_taps = 0;
    for (const std::vector<int64_t> & taps : taps_) {
        n_taps += static_cast<int64_t>(taps.size());
    }
    ggml_context_ptr ctx(ggml_init({ggml_tensor_overhead(), nullptr, true}));
    ggml_tensor * rows = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, n_embd_ * n_taps, n_rows + 2);
    Allocation memory = backend_.allocate(ctx.get(), "the drafter's features");
    ctx_ = std::move(ctx);
    memory_ = std::move(memory);
    rows_ = rows;
}

void FeatureRing::add_taps(CachedGraph & cached, GraphContext & g) const {
    cached.feature_rows =
        make_input(cached.ctx.get(), GGML_TYPE_I64, cached.shape.n_rows, 1, "feature_rows");
    const int64_t n_layer = g.hp.n_layer();
    for (const std::vector<int64_t> & taps : taps_) {
        g.taps_output = g.taps_output || *std::max_element(taps.begin(), taps.end()) >= n_layer;
    }
    g.tap = [this, rows = cached.feature_rows, &g](int il, ggml_tensor * x) {
        size_t at = 0;
        for (const std::vector<int64_t> & taps : taps_) {
            for (const int64_t tap : taps) {
                if (tap == il) {
                    ggml_tensor * part = ggml_view_2d(g.ctx, rows_, n_embd_, rows_->ne[1],
                                                      rows_->nb[1], at * n_embd_ * sizeof(float));
                    scatter_rows(g, part, x, rows);
                }
                ++at;
            }
        }
    };
}

size_t FeatureRing::offset_of(size_t index) const {
    size_t first = 0;
    for (size_t i = 0; i < index; ++i) {
        first += taps_[i].size();
    }
    return first * n_embd_ * sizeof(float);
}

ggml_tensor * FeatureRing::of_drafter(ggml_context * ctx, size_t drafter) const {
    return ggml_view_2d(ctx, rows_, n_embd_ * taps_[drafter].size(), rows_->ne[1], rows_->nb[1],
                        offset_of(drafter));
}

void FeatureRing::read(size_t index, const std::vector<int64_t> & rows, float * to) const {
    const size_t n = taps_[index].size() * n_embd_;
    std::vector<Backend::Fetch> fetches;
    for (const int64_t row : rows) {
        fetches.emplace_back(rows_, to, row * rows_->nb[1] + offset_of(index), n * sizeof(float));
        to += n;
    }
    backend_.read(fetches);
}

} // namespace dfl
