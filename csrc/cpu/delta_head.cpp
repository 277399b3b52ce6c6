#include "delta_head.h"

#include "float_kernels.h"

namespace dfl::cpu {

const DeltaHeadKernel * delta_head() {
    const DeltaHeadKernel * best = best_kernel(delta_head_avx512(), delta_head_avx2());
    return best != nullptr ? best : delta_head_portable();
}

} // namespace dfl::cpu
