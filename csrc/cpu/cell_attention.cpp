#include "cell_attention.h"

#include "float_kernels.h"

namespace dfl::cpu {

const CellAttentionKernel * cell_attention() {
    return best_kernel(cell_attention_avx512(), cell_attention_avx2());
}

} // namespace dfl::cpu
