#include "cpu/attention/cell_attention_tiles.h"
#include "cpu/isa/kernels.h"
#include "cpu/simd/floats512.h"

namespace dfl::cpu {

const CellAttentionKernel * avx512_attention() { return &CellAttentionTiles<Floats512>::KERNEL; }

} // namespace dfl::cpu
