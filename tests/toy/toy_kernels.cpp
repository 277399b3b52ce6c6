// A made-up instruction set: the portable kernels by another name, first in the table.
#include "cpu/isa/float_kernels.h"
#include "cpu/simd/floats_portable.h"

namespace dfl::cpu {

namespace {

struct FloatsToy : FloatsPortable {
    static constexpr const char * NAME = "toy";
};

Kernels toy_kernels() { return float_kernels<FloatsToy>(portable_attention()); }

} // namespace

Kernels portable_kernels();

// Replaces csrc/cpu/isa/table.cpp, which the linker takes from the library only if it is missing.
const std::vector<KernelSet> & kernel_sets() {
    static const std::vector<KernelSet> sets = {
        {"toy", [] { return true; }, toy_kernels},
        {"portable", [] { return true; }, portable_kernels},
    };
    return sets;
}

} // namespace dfl::cpu
