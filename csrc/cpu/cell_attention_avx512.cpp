#include "cell_attention.h"

#if defined(__AVX512F__)

#include "cell_attention_tiles.h"
#include "floats512.h"

namespace dfl::cpu {

const CellAttentionKernel * cell_attention_avx512() {
    return &CellAttentionTiles<Floats512>::KERNEL;
}

} // namespace dfl::cpu

#else

namespace dfl::cpu {

const CellAttentionKernel * cell_attention_avx512() { return nullptr; }

} // namespace dfl::cpu

#endif
