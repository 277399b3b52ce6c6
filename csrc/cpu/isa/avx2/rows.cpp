#include "cpu/rows/row_kernel.h"

#if defined(__AVX2__)

#include "cpu/rows/row_kernel_tiles.h"
#include "cpu/simd/floats256.h"

namespace dfl::cpu {

const RowKernel * row_kernel_avx2() { return &RowTiles<Floats256>::KERNEL; }

} // namespace dfl::cpu

#else

namespace dfl::cpu {

const RowKernel * row_kernel_avx2() { return nullptr; }

} // namespace dfl::cpu

#endif
