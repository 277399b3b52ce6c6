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

// Nodes by their positions, and each row's path.
static void add_tree(const Tree & tree, const int32_t * positions, const int64_t * cells,
                     cpu::SeenCells & seen) {
    std::vector<int64_t> order(tree.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return tree.depth(a) < tree.depth(b); });
    std::vector<int32_t> place(tree.size());
    for (const int64_t node : order) {
        place[node] = static_cast<int32_t>(seen.open.size());
        seen.open.push_back({positions[node], cells[node]});
    }
    for (int64_t node = 0, i = 0; i < tree.size(); node = ++i) {
        const auto first = static_cast<int64_t>(seen.paths.size()),
                   n = tree.depth(node) + int64_t(1);
        seen.rows.push_back({positions[i], positions[0], first});
        seen.paths.resize(first + n);
        for (int64_t at = first + n - 1; node >= 0; node = tree.parent(node), --at) {
            seen.paths[at] = place[node];
        }
    }
}

void find_seen_cells(const CellTable & table, const MaskRows & rows, std::vector<SeenRows> & seen) {
    seen.resize(rows.sequences.size());
    for (size_t i = 0; i < seen.size(); ++i) {
        const SequenceRows & of = rows.sequences[i];
        const int32_t * positions = rows.positions.data() + of.first;
        const int64_t * cells = rows.cells.data() + of.first;
        cpu::SeenCells & to = seen[i].cells;
        seen[i].first = of.first;
        seen[i].n = of.n;
        to.spans = table.spans(of.sequence);
        to.open.clear();
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
