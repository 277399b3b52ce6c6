// Kernels for vectors of floats of any width. Everything has internal linkage: the linker must not
// merge copies for different instruction sets.
#pragma once

#include "cpu/delta_net/delta_head_tiles.h"
#include "cpu/isa/kernels.h"
#include "cpu/matmul/float_product_tiles.h"
#include "cpu/rows/row_kernel_tiles.h"

namespace dfl::cpu {
namespace {

template <class V>
Kernels float_kernels(const CellAttentionKernel * attention) {
    static constexpr PackedProduct PRODUCTS[] = {
        product_of<FloatProduct<FloatWeights<V, GGML_TYPE_F32>>>(V::NAME),
        product_of<FloatProduct<FloatWeights<V, GGML_TYPE_F16>>>(V::NAME),
        product_of<FloatProduct<FloatWeights<V, GGML_TYPE_BF16>>>(V::NAME),
    };
    return {{{PRODUCTS, sizeof PRODUCTS / sizeof PRODUCTS[0]}},
            attention,
            &DeltaHeadTiles<V>::KERNEL,
            &RowTiles<V>::KERNEL};
}

} // namespace
} // namespace dfl::cpu
