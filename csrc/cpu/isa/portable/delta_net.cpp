#include "cpu/delta_net/delta_head_tiles.h"
#include "cpu/simd/floats_portable.h"

namespace dfl::cpu {

const DeltaHeadKernel * delta_head_portable() { return &DeltaHeadTiles<FloatsPortable>::KERNEL; }

} // namespace dfl::cpu
