// Feature ring: hidden states of the target that drafters and callers of a pass read. Passes write
// them to rows on the device; a row is free again when every drafter has computed its K/V.
#pragma once

#include "device/devices.h"
#include "graph/graph.h"

#include <vector>

namespace dfl {

class FeatureRing {
  public:
    FeatureRing(Backend & backend, int64_t n_embd, std::vector<std::vector<int64_t>> taps)
        : backend_(backend), n_embd_(n_embd), taps_(std::move(taps)) {}
    // Replaces all rows by n_rows rows of zeros. On DFL_STATUS_MEMORY nothing has changed.
    void allocate(int64_t n_rows);

    int64_t n_rows() const { return rows_->ne[1] - 2; }
    // Returns the row that padding writes to and that is never read.
    int64_t padding_row() const { return n_rows(); }
    // Returns the row that is always 0, which padding reads.
    int64_t zero_row() const { return n_rows() + 1; }
    uint64_t bytes() const { return memory_.bytes; }

    // Adds nodes that write the features of a pass to the rows in the input cached.feature_rows.
    void add_taps(CachedGraph & cached, GraphContext & g) const;
    // Returns a view of the features of one drafter in all rows, f32 [n_embd * taps, rows].
    ggml_tensor * of_drafter(ggml_context * ctx, size_t drafter) const;
    // Copies the features of the taps at `index` in some rows to the host, [row][tap][n_embd].
    void read(size_t index, const std::vector<int64_t> & rows, float * to) const;

  private:
    // Returns the offset in bytes of the features of the taps taps_[index] in a row.
    size_t offset_of(size_t index) const;

    Backend & backend_;
    int64_t n_embd_;
    std::vector<std::vector<int64_t>> taps_;
    ggml_context_ptr ctx_;
    Allocation memory_;
    ggml_tensor * rows_ = nullptr; // all features, f32 [n_embd * taps of all drafters, rows]
};

} // namespace dfl
