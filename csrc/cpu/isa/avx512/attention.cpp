#include "cpu/attention/cell_attention.h"

#if defined(__AVX512F__)

#include "cpu/attention/cell_attention_tiles.h"
#include "cpu/simd/floats512.h"

namespace dfl::cpu {

const CellAttentionKernel * cell_attention_avx512() {
    static constexpr CellAttentionKernel KERNEL = CellAttentionTiles<Floats512>::kernel("avx512");
    return &KERNEL;
}

} // namespace dfl::cpu

#else

namespace dfl::cpu {

const CellAttentionKernel * cell_attention_avx512() { return nullptr; }

} // namespace dfl::cpu

#endif
