#include "cpu/isa/float_kernels.h"
#include "cpu/simd/floats256.h"

namespace dfl::cpu {

PackedProducts avx2_products();

Kernels avx2_kernels() {
    Kernels kernels = float_kernels<Floats256>(avx2_attention());
    kernels.products.push_back(avx2_products());
    return kernels;
}

} // namespace dfl::cpu
