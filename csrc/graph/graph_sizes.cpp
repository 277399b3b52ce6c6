#include "graph/graph_sizes.h"

#include "cpu/attention/cell_attention.h"
#include "device/devices.h"
#include "model/weights.h"

#include <algorithm>
#include <cstdint>
#include <numeric>

namespace dfl {

// Rows of a usual verify (a DFlash block). Counts up to it get little padding.
static constexpr int64_t USUAL_BLOCK = 16;
// Rows of the smallest padded prompt chunk, and row count up to which padded sizes double.
static constexpr int64_t MIN_CHUNK = 32, FEW_ROWS = 64;
// Smallest padded sizes with several sequences: rows of drafts, rows of lanes, promotion steps.
static constexpr int64_t MIN_DRAFT = 16, MIN_LANE = 8, MIN_PROMOTE_STEPS = 4;

int64_t doubled(int64_t n, int64_t smallest) {
    int64_t size = smallest;
    while (size < n) {
        size *= 2;
    }
    return size;
}

int64_t row_bucket(int64_t n) {
    const int64_t size = doubled(n), between = size / 4 * 3;
    return n == 0 ? 0 : size >= 4 && between >= n ? between : size;
}

GraphSizes::GraphSizes(const Devices & devices, int64_t n_parallel)
    : fits_closely_(devices.main().is_host() || !devices.split().is_whole()),
      n_parallel_(n_parallel) {}

int64_t GraphSizes::close_step(int64_t n) const {
    if (n <= USUAL_BLOCK) {
        return row_bucket(n);
    }
    const int64_t max_steps = n_parallel_ > 1 && n <= FEW_ROWS ? 4 : 8;
    const int64_t step = doubled((n + max_steps - 1) / max_steps, 8);
    return (n + step - 1) / step * step;
}

int64_t GraphSizes::verify_rows(int64_t n, const Weights & weights) const {
    if (!fits_closely_) {
        return close_step(n);
    }
    return weights.packed.empty() && n > 4 && n % 4 >= 2 ? (n + 3) / 4 * 4 : n;
}

int64_t GraphSizes::lanes(int64_t n) const {
    return fits_closely_ || n == 0 ? n : std::min(doubled(n), n_parallel_);
}

int64_t GraphSizes::lane_rows(int64_t n) const {
    if (fits_closely_) {
        return n;
    }
    const bool is_close = n_parallel_ == 1 || n > USUAL_BLOCK; // a GPU pads few rows cheaply
    return is_close ? row_bucket(n) : doubled(n, MIN_LANE);
}

int64_t GraphSizes::chunk_rows(const std::vector<int64_t> & chunks) const {
    const int64_t n = std::accumulate(chunks.begin(), chunks.end(), int64_t(0));
    if (fits_closely_ || n == 0) {
        return n;
    }
    const bool doubles = chunks.size() > 1 || n <= FEW_ROWS;
    return doubles ? doubled(n, MIN_CHUNK) : row_bucket(n);
}

int64_t GraphSizes::mixed_verify_rows(int64_t n) const {
    return fits_closely_ ? n : n <= FEW_ROWS ? doubled(n, MIN_CHUNK) : close_step(n);
}

int64_t GraphSizes::draft_rows(int64_t n) const {
    if (fits_closely_ || n > FEW_ROWS) {
        return fits_closely_ ? n : close_step(n);
    }
    return n_parallel_ == 1 ? row_bucket(n) : doubled(n, MIN_DRAFT);
}

int64_t GraphSizes::append_rows(int64_t n_single, const std::vector<int64_t> & chunks) const {
    if (fits_closely_ || chunks.empty()) {
        return (chunks.empty() ? lanes(n_single) : n_single) + chunk_rows(chunks);
    }
    return (n_single > 1 ? n_parallel_ : n_single) + chunk_rows(chunks);
}

// Rounds up to steps that grow with the context, so that a long answer rarely needs a new graph.
int64_t GraphSizes::cells(int64_t high, int64_t size, bool has_masks) const {
    if (!has_masks) {
        return std::min(doubled(high, cpu::CELL_SEGMENT), size);
    }
    const int64_t step = doubled((high + 15) / 16, fits_closely_ ? 256 : 1024);
    return std::min((high + step - 1) / step * step, size);
}

int64_t GraphSizes::promote_steps(int64_t n) const {
    // Steps of ggml's fused delta-net operation run in turn: on a CPU padding costs full steps.
    return !serves_many() ? (fits_closely_ ? n : row_bucket(n)) : doubled(n, MIN_PROMOTE_STEPS);
}

int64_t GraphSizes::inject_rows(int64_t n) const {
    if (fits_closely_) {
        return n;
    }
    return serves_many() ? doubled(n, FEW_ROWS) : std::max(USUAL_BLOCK, row_bucket(n));
}

} // namespace dfl
