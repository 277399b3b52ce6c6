// The sizes that graphs are built for: more than what is asked for, where that saves building one.
//
// A CPU computes every row that is added, and builds a graph in a fraction of a round: it is given
// close fits. On other devices a few rows or cells more cost next to nothing beside the weights
// that are read for one, and a new graph costs several milliseconds, as its kernels are launched
// one by one before ggml's CUDA backend captures them: they are given few sizes.
#pragma once

#include <cstdint>

namespace dfl {

class Devices;
struct Weights;

// n rounded up to one of a few sizes with little padding: 0, 1, 2, 3, 4, 6, 8, 12,
// 16, 24...
int64_t row_bucket(int64_t n);

class GraphSizes {
  public:
    explicit GraphSizes(const Devices & devices);

    // Rows a verify of n is run with. ggml's CPU kernels for quantised weights take rows by four
    // and the rest one by one: a rest of three costs more than four, one of two as much. At most
    // four rows, one more costs what it saves. Our own take any number.
    int64_t verify_rows(int64_t n, const Weights & weights) const;
    // Cells that a pass attends of a cache of `size`, the highest in use being `high` - 1.
    // has_masks: over which some layers have masks; to others it is a limit.
    int64_t cells(int64_t high, int64_t size, bool has_masks) const;
    // Steps of a promotion of n accepted nodes.
    int64_t path(int64_t n) const;
    // Features that a draft injects first, of n that wait.
    int64_t injected(int64_t n) const;

  private:
    bool fit_closely_;
};

} // namespace dfl
