#include "cell_attention.h"

namespace dfl::cpu {

const CellAttentionKernel * cell_attention() {
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("f16c")) {
        return nullptr;
    }
    if (__builtin_cpu_supports("avx512f") && cell_attention_avx512() != nullptr) {
        return cell_attention_avx512();
    }
#endif
    return cell_attention_avx2();
}

} // namespace dfl::cpu
