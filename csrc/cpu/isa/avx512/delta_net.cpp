#include "cpu/delta_net/delta_head.h"

#if defined(__AVX512F__)

#include "cpu/delta_net/delta_head_tiles.h"
#include "cpu/simd/floats512.h"

namespace dfl::cpu {

const DeltaHeadKernel * delta_head_avx512() { return &DeltaHeadTiles<Floats512>::KERNEL; }

} // namespace dfl::cpu

#else

namespace dfl::cpu {

const DeltaHeadKernel * delta_head_avx512() { return nullptr; }

} // namespace dfl::cpu

#endif
