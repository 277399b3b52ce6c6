#include "floats_portable.h"
#include "row_kernel_tiles.h"

namespace dfl::cpu {

const RowKernel * row_kernel_portable() { return &RowTiles<FloatsPortable>::KERNEL; }

} // namespace dfl::cpu
