#include "row_kernel.h"

#if defined(__AVX512F__)

#include "floats512.h"
#include "row_kernel_tiles.h"

namespace dfl::cpu {

const RowKernel * row_kernel_avx512() { return &RowTiles<Floats512>::KERNEL; }

} // namespace dfl::cpu

#else

namespace dfl::cpu {

const RowKernel * row_kernel_avx512() { return nullptr; }

} // namespace dfl::cpu

#endif
