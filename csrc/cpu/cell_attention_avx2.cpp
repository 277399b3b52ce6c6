#include "cell_attention.h"

#if defined(__AVX2__)

#include "cell_attention_tiles.h"
#include "floats256.h"

namespace dfl::cpu {

const CellAttentionKernel * cell_attention_avx2() { return &CellAttentionTiles<Floats256>::KERNEL; }

} // namespace dfl::cpu

#else

namespace dfl::cpu {

const CellAttentionKernel * cell_attention_avx2() { return nullptr; }

} // namespace dfl::cpu

#endif
