#include "cpu/isa/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace dfl::cpu {

#define HAS(feature) (__builtin_cpu_supports(feature) != 0)
#define HAS_AVX2 (HAS("avx2") && HAS("fma") && HAS("f16c"))

#if defined(__x86_64__)
// Reads CPUID, as not every compiler's __builtin_cpu_supports knows avxvnni.
[[maybe_unused]] static bool has_avxvnni() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & 16) != 0;
}
#endif

// CMake writes kernel_sets.inc, which has the instruction sets of sets.def that are compiled.
#define KERNEL_SET(name, flags, is_available) Kernels name##_kernels();
#include "kernel_sets.inc"
#undef KERNEL_SET

const std::vector<KernelSet> & kernel_sets() {
#define KERNEL_SET(name, flags, is_available) {#name, [] { return is_available; }, name##_kernels},
    static const std::vector<KernelSet> sets = {
#include "kernel_sets.inc"
    };
    return sets;
}

} // namespace dfl::cpu
