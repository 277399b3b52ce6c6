// Selects, for each kernel, the best instruction set that this CPU and the compiler have.
#include "cpu/isa/kernels.h"

#include <algorithm>
#include <cctype>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace dfl::cpu {

#if defined(DFL_HAS_AVXVNNI)
// Not every compiler's __builtin_cpu_supports knows this one.
static bool has_avxvnni() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & 16) != 0;
}
#endif

static std::vector<Kernels> available_kernels() {
    std::vector<Kernels> list;
#if defined(DFL_HAS_AVX2)
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c");
    const auto add = [&](bool is_available, Kernels (*kernels)()) {
        if (has_avx2 && is_available) {
            list.push_back(kernels());
        }
    };
#if defined(DFL_HAS_AVX512BF16)
    add(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bf16"),
        avx512bf16_kernels);
#endif
#if defined(DFL_HAS_AVX512VNNI)
    add(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512vnni"),
        avx512vnni_kernels);
#endif
#if defined(DFL_HAS_AVX512)
    add(__builtin_cpu_supports("avx512f"), avx512_kernels);
#endif
#if defined(DFL_HAS_AVXVNNI)
    add(has_avxvnni(), avxvnni_kernels);
#endif
    add(true, avx2_kernels);
    add(true, avx2_float_kernels);
#endif
    list.push_back(portable_kernels());
    return list;
}

const std::vector<Kernels> & kernels() {
    static const std::vector<Kernels> list = available_kernels();
    return list;
}

static const PackedProduct * find(const PackedProducts & products, ggml_type type, bool in_place) {
    const PackedProduct * end = products.list + products.n;
    const PackedProduct * product = std::find_if(products.list, end, [&](const auto & one) {
        return one.type == type && (one.in_place || !in_place);
    });
    return product != end ? product : nullptr;
}

static const PackedProduct * best_product(ggml_type type, bool in_place) {
    for (const Kernels & set : kernels()) {
        if (const PackedProduct * product = find(set.products, type, in_place)) {
            return product;
        }
    }
    return find(ggml_dots(), type, in_place);
}

const PackedProduct * packed_product(ggml_type type) { return best_product(type, false); }

const PackedProduct * product_in_place(ggml_type type) { return best_product(type, true); }

std::string PackedProduct::name() const {
    std::string name = ggml_type_name(type);
    std::transform(name.begin(), name.end(), name.begin(), ::tolower);
    return name + " " + set;
}

template <class Kernel>
static const Kernel * best_kernel(const Kernel * Kernels::* kernel) {
    for (const Kernels & set : kernels()) {
        if (set.*kernel != nullptr) {
            return set.*kernel;
        }
    }
    return nullptr; // never: the portable set has all of them
}

const CellAttentionKernel * cell_attention() {
    static const CellAttentionKernel * const best = best_kernel(&Kernels::attention);
    return best;
}

const DeltaHeadKernel * delta_head() {
    static const DeltaHeadKernel * const best = best_kernel(&Kernels::delta_head);
    return best;
}

const RowKernel * row_kernel() {
    static const RowKernel * const best = best_kernel(&Kernels::rows);
    return best;
}

bool on_zen4() {
#if defined(__x86_64__)
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    const bool is_amd = __get_cpuid(0, &eax, &ebx, &ecx, &edx) != 0 && ecx == signature_AMD_ecx;
    if (is_amd && __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0) {
        const unsigned family = (eax >> 8 & 15) + (eax >> 20 & 255);
        return family == 0x19;
    }
#endif
    return false;
}

} // namespace dfl::cpu
