// Cells that the rows of a pass may attend to, in place of a mask, for attention in our own code.
#pragma once

#include "cache/cell_masks.h"
#include "cpu/attention/cell_attention.h"

#include <vector>

namespace dfl {

// Cells visible to rows [first, first + n) of a pass, all of one sequence.
struct VisibleRows {
    int64_t first, n;
    cpu::VisibleCells cells; // its rows are these
};

// Sets `seen` to what the rows of each sequence see. Padding sees nothing.
void find_visible_cells(const CellTable & table, const MaskRows & rows,
                        std::vector<VisibleRows> & visible);

} // namespace dfl
