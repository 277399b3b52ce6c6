#include "cpu/attention/cell_attention_tiles.h"
#include "cpu/isa/kernels.h"
#include "cpu/simd/floats256.h"

namespace dfl::cpu {

const CellAttentionKernel * avx2_attention() { return &CellAttentionTiles<Floats256>::KERNEL; }

} // namespace dfl::cpu
