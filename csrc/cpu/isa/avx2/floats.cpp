#include "cpu/isa/float_kernels.h"
#include "cpu/simd/floats256.h"

namespace dfl::cpu {

Kernels avx2_float_kernels() { return float_kernels<Floats256>(avx2_attention()); }

} // namespace dfl::cpu
