#include "cpu/isa/float_kernels.h"
#include "cpu/simd/floats_portable.h"

namespace dfl::cpu {

Kernels portable_kernels() { return float_kernels<FloatsPortable>(portable_attention()); }

} // namespace dfl::cpu
