// Selects for each kernel the best instruction set that this CPU and the compiler have.
#include "cpu/isa/kernels.h"
#include "error.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace dfl::cpu {

static std::vector<const KernelSet *> available_sets() {
    std::vector<const KernelSet *> sets;
    for (const KernelSet & set : kernel_sets()) {
        if (set.runs_here()) {
            sets.push_back(&set);
        }
    }
    const char * wanted = std::getenv("DFLASH_CPU");
    if (wanted != nullptr && *wanted != '\0') {
        const auto first = std::find_if(sets.begin(), sets.end(), [&](const KernelSet * set) {
            return std::string(set->name) == wanted;
        });
        std::string names;
        for (const KernelSet * set : sets) {
            names += (names.empty() ? "" : ", ") + std::string(set->name);
        }
        DFL_CHECK(
            first != sets.end(), DFL_STATUS_ARGUMENT,
            "DFLASH_CPU is \"%.32s\"; unset it, or set it to an instruction set of this CPU: %s",
            wanted, names.c_str());
        sets.erase(sets.begin(), first);
    }
    return sets;
}

std::vector<std::string> kernel_set_names() {
    std::vector<std::string> names;
    for (const KernelSet * set : available_sets()) {
        names.emplace_back(set->name);
    }
    return names;
}

const std::vector<Kernels> & kernels() {
    static const std::vector<Kernels> list = [] {
        std::vector<Kernels> kernels;
        for (const KernelSet * set : available_sets()) {
            kernels.push_back(set->kernels());
        }
        return kernels;
    }();
    return list;
}

static const PackedProduct * find(const std::vector<PackedProducts> & lists, ggml_type type,
                                  bool in_place) {
    for (const PackedProducts & products : lists) {
        const PackedProduct * end = products.list + products.n;
        const PackedProduct * product = std::find_if(products.list, end, [&](const auto & one) {
            return one.type == type && (one.in_place || !in_place);
        });
        if (product != end) {
            return product;
        }
    }
    return nullptr;
}

static const PackedProduct * best_product(ggml_type type, bool in_place) {
    for (const Kernels & set : kernels()) {
        if (const PackedProduct * product = find(set.products, type, in_place)) {
            return product;
        }
    }
    return find({ggml_dots()}, type, in_place);
}

const PackedProduct * packed_product(ggml_type type) { return best_product(type, false); }

const PackedProduct * product_in_place(ggml_type type) { return best_product(type, true); }

std::string PackedProduct::name() const {
    std::string name = ggml_type_name(type);
    std::transform(name.begin(), name.end(), name.begin(), ::tolower);
    return name + " " + set;
}

template <class Kernel, const Kernel * Kernels::* kernel>
static const Kernel * best() {
    static const Kernel * const found = [] {
        const auto & sets = kernels();
        const auto has_kernel = [](const Kernels & set) { return set.*kernel != nullptr; };
        return (*std::find_if(sets.begin(), sets.end(), has_kernel)).*kernel;
    }();
    return found;
}

const CellAttentionKernel * cell_attention() {
    return best<CellAttentionKernel, &Kernels::attention>();
}

const DeltaHeadKernel * delta_head() { return best<DeltaHeadKernel, &Kernels::delta_head>(); }

const RowKernel * row_kernel() { return best<RowKernel, &Kernels::rows>(); }

// Models of AMD family 0x19 that are Zen 4; other models are Zen 3.
// Source: Linux, arch/x86/kernel/cpu/amd.c.
struct ModelRange {
    unsigned first, last;
};
static constexpr ModelRange ZEN4_MODELS[] = {{0x10, 0x1f}, {0x60, 0xaf}};

bool on_zen4() {
#if defined(__x86_64__)
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    const bool is_amd = __get_cpuid(0, &eax, &ebx, &ecx, &edx) != 0 && ecx == signature_AMD_ecx;
    if (is_amd && __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0) {
        const unsigned family = (eax >> 8 & 15) + (eax >> 20 & 255);
        const unsigned model = (eax >> 4 & 15) | (eax >> 12 & 0xf0);
        return family == 0x19 && std::any_of(std::begin(ZEN4_MODELS), std::end(ZEN4_MODELS),
                                             [&](const ModelRange & range) {
                                                 return model >= range.first && model <= range.last;
                                             });
    }
#endif
    return false;
}

} // namespace dfl::cpu
