#include "cpu/attention/cell_attention.h"

#include "cpu/attention/cell_views.h"

namespace dfl::cpu {

SegmentRange visible_segments(const CellAttention & work, int64_t first, int64_t n) {
    int64_t low = INT64_MAX, high = 0;
    for (int64_t row = first / work.n_group; row <= (first + n - 1) / work.n_group; ++row) {
        const VisibleRange range = visible_range(work, row);
        low = std::min(low, range.first);
        high = std::max(high, range.end);
    }
    if (!work.visible->spans.empty()) { // caches of layers with a window drop old positions
        low = std::max(low, work.visible->spans.front().position);
    }
    return low < high ? SegmentRange{low / CELL_SEGMENT, (high - 1) / CELL_SEGMENT + 1}
                      : SegmentRange{0, 0};
}

} // namespace dfl::cpu
