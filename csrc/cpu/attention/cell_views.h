// Positions that a row of CellAttention sees in a layer.
#pragma once

#include "cpu/attention/cell_attention.h"

#include <algorithm>

namespace dfl::cpu {
namespace {

// Positions [first, end): those before `spans_end` lie in the spans, the others are open cells.
struct SeenRange {
    int64_t first, spans_end, end;
    int64_t path; // of position spans_end
};

inline SeenRange seen_range(const CellAttention & work, int64_t row) {
    const SeenCells & seen = *work.seen;
    const RowView & view = seen.rows[row];
    SeenRange range = {0, view.end, view.position + 1, view.path};
    if (work.window > 0) {
        range.first = std::max<int64_t>(0, view.position - work.window + 1);
    }
    if (!work.causal && !seen.spans.empty()) {
        const int64_t all = seen.spans.back().position + seen.spans.back().n;
        range.end = work.window > 0 ? std::min(all, view.position + work.window) : all;
        range.spans_end = range.end;
    }
    return range;
}

} // namespace
} // namespace dfl::cpu
