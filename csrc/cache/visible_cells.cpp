#include "cache/visible_cells.h"

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

// Adds a tree to `visible`: its nodes' cells as pending cells, ordered by depth, and for each row
// the path from the root.
static void add_tree(const Tree & tree, const int32_t * positions, const int64_t * cells,
                     cpu::VisibleCells & visible) {
    std::vector<int64_t> order(tree.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return tree.depth(a) < tree.depth(b); });
    std::vector<int32_t> place(tree.size());
    for (const int64_t node : order) {
        place[node] = static_cast<int32_t>(visible.pending.size());
        visible.pending.push_back({positions[node], cells[node]});
    }
    for (int64_t node = 0, i = 0; i < tree.size(); node = ++i) {
        const auto first = static_cast<int64_t>(visible.paths.size()),
                   n = tree.depth(node) + int64_t(1);
        visible.rows.push_back({positions[i], positions[0], first});
        visible.paths.resize(first + n);
        for (int64_t at = first + n - 1; node >= 0; node = tree.parent(node), --at) {
            visible.paths[at] = place[node];
        }
    }
}

void find_visible_cells(const CellTable & table, const MaskRows & rows,
                        std::vector<VisibleRows> & visible) {
    visible.resize(rows.sequences.size());
    for (size_t i = 0; i < visible.size(); ++i) {
        const SequenceRows & of = rows.sequences[i];
        const int32_t * positions = rows.positions.data() + of.first;
        const int64_t * cells = rows.cells.data() + of.first;
        cpu::VisibleCells & to = visible[i].cells;
        visible[i].first = of.first;
        visible[i].n = of.n;
        to.spans = table.spans(of.sequence);
        to.pending.clear();
        to.rows.clear();
        to.paths.clear();
        if (of.tree != nullptr && !of.tree->is_chain()) {
            add_tree(*of.tree, positions, cells, to);
            continue;
        }
        for (int64_t row = 0; row < of.n; ++row) {
            if (of.tree != nullptr) {
                add_cell(to.spans, positions[row], cells[row]);
            }
            to.rows.push_back({positions[row], positions[row] + 1, 0});
        }
    }
}

} // namespace dfl
