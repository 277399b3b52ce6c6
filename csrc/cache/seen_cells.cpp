#include "cache/seen_cells.h"

#include <algorithm>
#include <numeric>

namespace dfl {

static void add_cell(std::vector<cpu::CellSpan> & spans, int64_t position, int64_t cell) {
    if (!spans.empty()) {
        cpu::CellSpan & last = spans.back();
        if (last.position + last.n == position && last.cell + last.n == cell) {
            ++last.n;
            return;
        }
    }
    spans.push_back({position, cell, 1});
}

static void add_chain(const MaskRows & rows, cpu::SeenCells & seen) {
    const int64_t n = rows.tree->size();
    for (int64_t i = 0; i < n; ++i) {
        add_cell(seen.spans, rows.positions[i], rows.cells[i]);
    }
    for (const int32_t position : rows.positions) {
        seen.rows.push_back({position, position + 1, 0});
    }
}

// Nodes by their positions, and each row's path; rows after the nodes are copies of the root.
static void add_tree(const MaskRows & rows, cpu::SeenCells & seen) {
    const Tree & tree = *rows.tree;
    const auto n_rows = static_cast<int64_t>(rows.positions.size());
    std::vector<int64_t> order(tree.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return tree.depth(a) < tree.depth(b); });
    std::vector<int32_t> place(tree.size());
    for (const int64_t node : order) {
        place[node] = static_cast<int32_t>(seen.open.size());
        seen.open.push_back({rows.positions[node], rows.cells[node]});
    }
    for (int64_t i = 0; i < n_rows; ++i) {
        int64_t node = i < tree.size() ? i : 0;
        const auto first = static_cast<int64_t>(seen.paths.size()),
                   n = tree.depth(node) + int64_t(1);
        seen.rows.push_back({rows.positions[i], rows.positions[0], first});
        seen.paths.resize(first + n);
        for (int64_t at = first + n - 1; node >= 0; node = tree.parent(node), --at) {
            seen.paths[at] = place[node];
        }
    }
}

void find_seen_cells(const CellTable & table, const MaskRows & rows, cpu::SeenCells & seen) {
    seen.spans.clear();
    seen.open.clear();
    seen.rows.clear();
    seen.paths.clear();
    for (int64_t cell = 0; cell < table.high(); ++cell) {
        if (table.sequence(cell) == SEQUENCE) {
            add_cell(seen.spans, table.position(cell), cell);
        }
    }
    std::sort(
        seen.spans.begin(), seen.spans.end(),
        [](const cpu::CellSpan & a, const cpu::CellSpan & b) { return a.position < b.position; });
    if (rows.tree == nullptr) {
        for (const int32_t position : rows.positions) {
            seen.rows.push_back({position, position + 1, 0});
        }
    } else if (rows.tree->is_chain()) {
        add_chain(rows, seen);
    } else {
        add_tree(rows, seen);
    }
}

} // namespace dfl
