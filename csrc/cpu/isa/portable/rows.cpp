#include "cpu/rows/row_kernel_tiles.h"
#include "cpu/simd/floats_portable.h"

namespace dfl::cpu {

const RowKernel * row_kernel_portable() { return &RowTiles<FloatsPortable>::KERNEL; }

} // namespace dfl::cpu
