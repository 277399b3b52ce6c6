#include "cpu/delta_net/delta_head.h"

#if defined(__AVX2__)

#include "cpu/delta_net/delta_head_tiles.h"
#include "cpu/simd/floats256.h"

namespace dfl::cpu {

const DeltaHeadKernel * delta_head_avx2() { return &DeltaHeadTiles<Floats256>::KERNEL; }

} // namespace dfl::cpu

#else

namespace dfl::cpu {

const DeltaHeadKernel * delta_head_avx2() { return nullptr; }

} // namespace dfl::cpu

#endif
