#include "cpu/rows/row_kernel.h"

#if defined(__AVX512F__)

#include "cpu/rows/row_kernel_tiles.h"
#include "cpu/simd/floats512.h"

namespace dfl::cpu {

const RowKernel * row_kernel_avx512() { return &RowTiles<Floats512>::KERNEL; }

} // namespace dfl::cpu

#else

namespace dfl::cpu {

const RowKernel * row_kernel_avx512() { return nullptr; }

} // namespace dfl::cpu

#endif
