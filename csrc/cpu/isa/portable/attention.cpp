#include "cpu/attention/cell_attention_tiles.h"
#include "cpu/isa/kernels.h"
#include "cpu/simd/floats_portable.h"

namespace dfl::cpu {

const CellAttentionKernel * portable_attention() {
    return &CellAttentionTiles<FloatsPortable>::KERNEL;
}

} // namespace dfl::cpu
