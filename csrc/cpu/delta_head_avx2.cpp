#include "delta_head.h"

#if defined(__AVX2__)

#include "delta_head_tiles.h"
#include "floats256.h"

namespace dfl::cpu {

const DeltaHeadKernel * delta_head_avx2() { return &DeltaHeadTiles<Floats256>::KERNEL; }

} // namespace dfl::cpu

#else

namespace dfl::cpu {

const DeltaHeadKernel * delta_head_avx2() { return nullptr; }

} // namespace dfl::cpu

#endif
