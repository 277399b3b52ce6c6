// Which cells the rows of a pass see, as attention in our own code takes it in place of a mask.
#pragma once

#include "cache/cell_masks.h"
#include "cpu/cell_attention.h"

namespace dfl {

// Sets `seen` to what these rows see. The committed cells are found anew each time: a look at each
// takes less than a hundredth of attending to it.
void find_seen_cells(const CellTable & table, const MaskRows & rows, cpu::SeenCells & seen);

} // namespace dfl
