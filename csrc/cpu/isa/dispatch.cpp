// Selects, for each kernel, the best instruction set that this CPU and the compiler have.
#include "cpu/attention/cell_attention.h"
#include "cpu/delta_net/delta_head.h"
#include "cpu/matmul/product_lists.h"
#include "cpu/rows/row_kernel.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace dfl::cpu {

namespace {

struct InstructionSet {
    const char * name;
    bool (*is_available)();
    PackedProducts (*products)();
};

#if defined(__x86_64__)
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); // and so F16C
}

bool has_avx512vnni() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}

bool has_avx512() { return has_avx2() && __builtin_cpu_supports("avx512f"); }

bool has_avx512bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

// Not every compiler's __builtin_cpu_supports knows this one.
bool has_avxvnni() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return has_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & 16) != 0;
}
#else
bool has_avx2() { return false; }
bool has_avx512vnni() { return false; }
bool has_avxvnni() { return false; }
bool has_avx512() { return false; }
bool has_avx512bf16() { return false; }
#endif

bool everywhere() { return true; }

// Best first.
constexpr InstructionSet SETS[] = {
    {"avx512bf16", has_avx512bf16, avx512bf16_float_products},
    {"avx512vnni", has_avx512vnni, avx512vnni_products},
    {"avx512", has_avx512, avx512_float_products},
    {"avxvnni", has_avxvnni, avxvnni_products},
    {"avx2", has_avx2, avx2_products},
    {"avx2", has_avx2, avx2_float_products},
    {"portable", everywhere, portable_float_products},
    {"ggml", everywhere, ggml_dots},
};

const PackedProduct * best(ggml_type type, const char * at_most, bool in_place) {
    bool allowed = at_most[0] == '\0';
    for (const InstructionSet & set : SETS) {
        allowed = allowed || std::strcmp(at_most, set.name) == 0;
        if (!allowed || !set.is_available()) {
            continue;
        }
        const PackedProducts products = set.products();
        for (int i = 0; i < products.n; ++i) {
            const PackedProduct & product = products.list[i];
            if (product.type == type && (product.in_place || !in_place)) {
                return &product;
            }
        }
    }
    return nullptr;
}

// The best of a kernel for AVX-512 and one for AVX2, NULL where the compiler lacks it; or NULL.
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

} // namespace

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

const PackedProduct * packed_product(ggml_type type, const char * at_most) {
    return best(type, at_most, false);
}

const PackedProduct * product_in_place(ggml_type type) { return best(type, "", true); }

const CellAttentionKernel * cell_attention() {
    const CellAttentionKernel * best = best_kernel(cell_attention_avx512(), cell_attention_avx2());
    return best != nullptr ? best : cell_attention_portable();
}

const DeltaHeadKernel * delta_head() {
    const DeltaHeadKernel * best = best_kernel(delta_head_avx512(), delta_head_avx2());
    return best != nullptr ? best : delta_head_portable();
}

const RowKernel * row_kernel() {
    const RowKernel * best = best_kernel(row_kernel_avx512(), row_kernel_avx2());
    return best != nullptr ? best : row_kernel_portable();
}

} // namespace dfl::cpu
