// Which of the kernels in floats this CPU runs.
#pragma once

namespace dfl::cpu {

// Of kernels for AVX-512 and for AVX2, NULL where the compiler lacks it, the best; or NULL.
template <class Kernel>
const Kernel * best_kernel(const Kernel * avx512, const Kernel * avx2) {
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("f16c")) {
        return nullptr;
    }
    if (__builtin_cpu_supports("avx512f") && avx512 != nullptr) {
        return avx512;
    }
#endif
    return avx2;
}

} // namespace dfl::cpu
