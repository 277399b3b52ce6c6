// The sizes that graphs are built for: more than what is asked for, where that saves building one.
//
// A CPU computes every row that is added, and builds a graph in a fraction of a round: it is given
// close fits. On other devices a few rows or cells more cost next to nothing beside the weights
// that are read for one, and a new graph costs several milliseconds, as its kernels are launched
// one by one before ggml's CUDA backend captures them: they are given few sizes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace dfl {

class Devices;
struct Weights;

// The least that holds n of `smallest` and its doubles.
int64_t doubled(int64_t n, int64_t smallest = 1);
// n rounded up to one of a few sizes with little padding: 0, 1, 2, 3, 4, 6, 8, 12,
// 16, 24...
int64_t row_bucket(int64_t n);

// Maximum of the last values: where sequences come and go, the cells that passes attend rise and
// fall all the time, and each size is a graph.
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
    static constexpr int64_t REMEMBERED = 512; // passes, and as many before these
    int64_t now_ = 0, before_ = 0, n_calls_ = 0;
};

class GraphSizes {
  public:
    // n_parallel: most sequences of a pass.
    GraphSizes(const Devices & devices, int64_t n_parallel);

    // Rows a verify of n is run with. ggml's CPU kernels for quantised weights take rows by four
    // and the rest one by one: a rest of three costs more than four, one of two as much. At most
    // four rows, one more costs what it saves. Our own take any number. On a device beyond 16 a
    // quarter more at most, of many sequences half of up to 64, by eights as its kernels take them.
    int64_t verify_rows(int64_t n, const Weights & weights) const;
    // Rows that a pass without verifies is run with: of n_single sequences that append one each,
    // and of prompt chunks.
    int64_t append_rows(int64_t n_single, const std::vector<int64_t> & chunks) const;
    // Rows of prompt chunks alone. In a mixed pass a few more rows cost little, and several chunks
    // have too many total sizes.
    int64_t chunk_rows(const std::vector<int64_t> & chunks) const;
    // Rows that are verified in a pass with prompt chunks, and its rows with logits.
    int64_t mixed_verify_rows(int64_t n) const;
    // Rows with logits, of n that are wanted, where not all are.
    int64_t out_rows(int64_t n) const { return fits_closely_ || n < 2 ? n : n_parallel_; }
    // Lanes of recurrent layers for n sequences, and rows of those for up to n of each.
    int64_t lanes(int64_t n) const;
    int64_t lane_rows(int64_t n) const;
    // The same of prompt chunks.
    int64_t chunk_lane_rows(int64_t n) const { return fits_closely_ ? n : row_bucket(n); }
    // Rows of a drafter's pass. It reads few weights.
    int64_t draft_rows(int64_t n) const;
    // Cells that a pass attends of a cache of `size`, the highest in use being `high` - 1.
    // has_masks: over which some layers have masks; to others it is a limit.
    int64_t cells(int64_t high, int64_t size, bool has_masks) const;
    // The same of passes one after another: where sequences come and go the most of the last ones.
    int64_t cells(int64_t high, int64_t size, bool has_masks, RecentMax & recent) const {
        const int64_t n = cells(high, size, has_masks);
        return has_masks && serves_many() ? std::min(shared_cells(recent(n)), size) : n;
    }
    int64_t shared_cells(int64_t n) const { return row_bucket((n + 8191) / 8192) * 8192; }
    // Steps of a promotion of up to n accepted nodes.
    int64_t promote_steps(int64_t n) const;
    // Features that are taken into a drafter's K/V at once, of n that wait.
    int64_t inject_rows(int64_t n) const;
    // True if sizes are few, so that a graph serves many passes.
    bool uses_few_sizes() const { return !fits_closely_; }
    // True if moreover a pass may have rows of several sequences.
    bool serves_many() const { return !fits_closely_ && n_parallel_ > 1; }

  private:
    int64_t close_step(int64_t n) const;

    bool fits_closely_;
    int64_t n_parallel_;
};

} // namespace dfl
