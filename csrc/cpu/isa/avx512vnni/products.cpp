#include "cpu/isa/tile_kernels.h"
#include "cpu/simd/vector512.h"

namespace dfl::cpu {

Kernels avx512vnni_kernels() { return {{tile_products<Vector512>()}}; }

} // namespace dfl::cpu
