#include "cpu/attention/cell_attention.h"

#if defined(__AVX2__)

#include "cpu/attention/cell_attention_tiles.h"
#include "cpu/simd/floats256.h"

namespace dfl::cpu {

const CellAttentionKernel * cell_attention_avx2() {
    static constexpr CellAttentionKernel KERNEL = CellAttentionTiles<Floats256>::kernel("avx2");
    return &KERNEL;
}

} // namespace dfl::cpu

#else

namespace dfl::cpu {

const CellAttentionKernel * cell_attention_avx2() { return nullptr; }

} // namespace dfl::cpu

#endif
