// Sizes that graphs are built for, rounded up so that one graph serves several sizes. A CPU
// computes all padding and builds graphs quickly, so sizes fit closely. On a GPU padding is cheap
// beside reading the weights, but a new graph costs milliseconds until its kernels are captured.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace dfl {

class Devices;
struct Weights;

// Returns the smallest product of `smallest` and a power of two that is at least n.
int64_t doubled(int64_t n, int64_t smallest = 1);
// Rounds n up to one of 0, 1, 2, 3, 4, 6, 8, 12, 16, 24...
int64_t row_bucket(int64_t n);

// Maximum of recent values, so that few graphs serve sizes that vary as sequences come and go.
class RecentMax {
  public:
    int64_t operator()(int64_t n) {
        if (++n_calls_ > REMEMBERED) {
            before_ = now_;
            now_ = n_calls_ = 0;
        }
        now_ = std::max(now_, n);
        return std::max(now_, before_);
    }

  private:
    // Number of calls in a period; the maximum covers the present and the previous period.
    static constexpr int64_t REMEMBERED = 512;
    int64_t now_ = 0, before_ = 0, n_calls_ = 0;
};

class GraphSizes {
  public:
    GraphSizes(const Devices & devices, int64_t n_parallel);

    // Returns the padded row count of a verify of n rows. ggml's quantised CPU kernels take 4 rows
    // at a time: beyond 4, a remainder of 2 or 3 rows costs no less than 4. Our own CPU kernels
    // take any number. GPUs: beyond 16 rows a multiple of 8 or more, which kernels take at once.
    int64_t verify_rows(int64_t n, const Weights & weights) const;
    // Returns the padded row count of a pass with n_single one-row appends and these prompt chunks.
    int64_t append_rows(int64_t n_single, const std::vector<int64_t> & chunks) const;
    // Returns the padded row count of prompt chunks; sizes double for several chunks.
    int64_t chunk_rows(const std::vector<int64_t> & chunks) const;
    // Returns the padded count of n verified rows, or rows with logits, beside prompt chunks.
    int64_t mixed_verify_rows(int64_t n) const;
    // Returns the padded count of rows with logits, if only n rows of a pass need logits.
    int64_t out_rows(int64_t n) const { return fits_closely_ || n < 2 ? n : n_parallel_; }
    // Return the padded numbers of lanes for n sequences, and of rows of a lane for up to n rows.
    int64_t lanes(int64_t n) const;
    int64_t lane_rows(int64_t n) const;
    // Returns the padded row count of a lane for prompt chunks of up to n rows.
    int64_t chunk_lane_rows(int64_t n) const { return fits_closely_ ? n : row_bucket(n); }
    // Returns the padded row count of a drafter's pass; drafters read few weights.
    int64_t draft_rows(int64_t n) const;
    // Returns the padded number of cells that a pass attends to, given the end of the used cells
    // (`high`) and the size of the cache. Without masks the number only bounds the visible cells.
    int64_t cells(int64_t high, int64_t size, bool has_masks) const;
    // Returns the padded number of attended cells: the recent maximum if there are several
    // sequences.
    int64_t cells(int64_t high, int64_t size, bool has_masks, RecentMax & recent) const {
        const int64_t n = cells(high, size, has_masks);
        return has_masks && serves_many() ? std::min(shared_cells(recent(n)), size) : n;
    }
    int64_t shared_cells(int64_t n) const { return row_bucket((n + 8191) / 8192) * 8192; }
    // Returns the padded step count of a promotion of up to n accepted nodes.
    int64_t promote_steps(int64_t n) const;
    // Returns the padded row count of an injection of n features into a drafter's K/V.
    int64_t inject_rows(int64_t n) const;
    // True if padded sizes are few, so that one graph serves many passes (not on a CPU).
    bool uses_few_sizes() const { return !fits_closely_; }
    // True if padded sizes are few and the engine may run several sequences.
    bool serves_many() const { return !fits_closely_ && n_parallel_ > 1; }

  private:
    int64_t close_step(int64_t n) const;

    bool fits_closely_;
    int64_t n_parallel_;
};

} // namespace dfl
