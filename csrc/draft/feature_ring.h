// Features: hidden states of the target that drafters read. Passes write them on the device, into
// rows that are free again once every drafter has taken them into its K/V.
#pragma once

#include "device/devices.h"
#include "graph/graph.h"

#include <vector>

namespace dfl {

class FeatureRing {
  public:
    // taps: of each drafter, see DraftHparams::taps.
    FeatureRing(Backend & backend, int64_t n_embd, std::vector<std::vector<int64_t>> taps)
        : backend_(backend), n_embd_(n_embd), taps_(std::move(taps)) {}
    // Replaces its rows by n rows of zeros. Throws DFL_STATUS_MEMORY and changes nothing.
    void allocate(int64_t n_rows);

    int64_t n_rows() const { return rows_->ne[1] - 2; }
    // Rows beside these: one that nobody reads, and one that stays zero.
    int64_t padding_row() const { return n_rows(); }
    int64_t zero_row() const { return n_rows() + 1; }
    uint64_t bytes() const { return memory_.bytes; }

    // Makes g write the features of its rows into rows given by cached.feature_rows.
    void add_taps(CachedGraph & cached, GraphContext & g) const;
    // Features of one drafter, its taps side by side, in all rows: f32 [n_embd * taps, rows].
    ggml_tensor * of_drafter(ggml_context * ctx, size_t drafter) const;

  private:
    Backend & backend_;
    int64_t n_embd_;
    std::vector<std::vector<int64_t>> taps_;
    ggml_context_ptr ctx_;
    Allocation memory_;
    ggml_tensor * rows_ = nullptr; // f32 [n_embd * taps of all drafters, rows]
};

} // namespace dfl
