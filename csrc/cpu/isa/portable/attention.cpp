#include "cpu/attention/cell_attention_tiles.h"
#include "cpu/simd/floats_portable.h"

namespace dfl::cpu {

const CellAttentionKernel * cell_attention_portable() {
    static constexpr CellAttentionKernel KERNEL =
        CellAttentionTiles<FloatsPortable>::kernel("portable");
    return &KERNEL;
}

} // namespace dfl::cpu
