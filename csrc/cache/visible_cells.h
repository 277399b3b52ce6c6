// Cells that each row of a pass may attend to, for our own CPU attention, which uses no masks.
#pragma once

#include "cache/cell_masks.h"
#include "cpu/attention/cell_attention.h"

#include <vector>

namespace dfl {

struct VisibleRows {
    int64_t first, n;
    cpu::VisibleCells cells;
};

// Fills `visible` with the cells that each sequence's rows attend to. Padding attends to none.
void find_visible_cells(const CellTable & table, const MaskRows & rows,
                        std::vector<VisibleRows> & visible);

} // namespace dfl
