// Positions that a row of CellAttention sees in a layer.
#pragma once

#include "cpu/attention/cell_attention.h"

#include <algorithm>

namespace dfl::cpu {
namespace {

// Visible positions [first, end) of a row: in spans up to `spans_end`, then in pending cells.
struct VisibleRange {
    int64_t first, spans_end, end;
    int64_t path; // index in VisibleCells::paths of the row's ancestor at position spans_end
};

inline VisibleRange visible_range(const CellAttention & work, int64_t row) {
    const VisibleCells & visible = *work.visible;
    const RowView & view = visible.rows[row];
    VisibleRange range = {0, view.end, view.position + 1, view.path};
    if (work.window > 0) {
        range.first = std::max<int64_t>(0, view.position - work.window + 1);
    }
    if (!work.causal && !visible.spans.empty()) {
        const int64_t all = visible.spans.back().position + visible.spans.back().n;
        range.end = work.window > 0 ? std::min(all, view.position + work.window) : all;
        range.spans_end = range.end;
    }
    return range;
}

} // namespace
} // namespace dfl::cpu
