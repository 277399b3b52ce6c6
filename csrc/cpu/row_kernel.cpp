#include "row_kernel.h"

#include "float_kernels.h"

namespace dfl::cpu {

const RowKernel * row_kernel() { return best_kernel(row_kernel_avx512(), row_kernel_avx2()); }

} // namespace dfl::cpu
