#include "delta_head.h"

namespace dfl::cpu {

const DeltaHeadKernel * delta_head() {
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("f16c")) {
        return nullptr;
    }
    if (__builtin_cpu_supports("avx512f") && delta_head_avx512() != nullptr) {
        return delta_head_avx512();
    }
#endif
    return delta_head_avx2();
}

} // namespace dfl::cpu
