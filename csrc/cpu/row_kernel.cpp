#include "row_kernel.h"

#include "float_kernels.h"

namespace dfl::cpu {

const RowKernel * row_kernel() {
    const RowKernel * best = best_kernel(row_kernel_avx512(), row_kernel_avx2());
    return best != nullptr ? best : row_kernel_portable();
}

} // namespace dfl::cpu
