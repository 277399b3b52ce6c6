#include "delta_head.h"

#include "float_kernels.h"

namespace dfl::cpu {

const DeltaHeadKernel * delta_head() { return best_kernel(delta_head_avx512(), delta_head_avx2()); }

} // namespace dfl::cpu
