#include "cpu/isa/float_kernels.h"
#include "cpu/simd/floats512.h"

namespace dfl::cpu {

Kernels avx512_kernels() { return float_kernels<Floats512>(avx512_attention()); }

} // namespace dfl::cpu
