// Products of quantised weights for byte vectors of any width. Everything has internal linkage: the
// linker must not merge copies for different instruction sets.
#pragma once

#include "cpu/isa/kernels.h"
#include "cpu/matmul/iq4_nl.h"
#include "cpu/matmul/iq4_xs.h"
#include "cpu/matmul/q2_k.h"
#include "cpu/matmul/q4_0.h"
#include "cpu/matmul/q4_k.h"
#include "cpu/matmul/q6_k.h"
#include "cpu/matmul/q8_0.h"

namespace dfl::cpu {
namespace {

template <class V>
PackedProducts tile_products() {
    static constexpr PackedProduct PRODUCTS[] = {
        product_of<Tiles<Blocks32<V, Q4_0>>>(V::NAME),
        product_of<Tiles<Blocks32<V, Q4_1>>>(V::NAME),
        product_of<Tiles<Blocks32<V, Q5_0>>>(V::NAME),
        product_of<Tiles<Blocks32<V, Q5_1>>>(V::NAME),
        product_of<Tiles<Blocks32<V, Q8_0>>>(V::NAME),
        product_of<Tiles<Blocks32<V, IQ4_NL>>>(V::NAME),
        product_of<Tiles<Blocks32<V, MXFP4>>>(V::NAME),
        product_of<Tiles<Q2_K<V>>>(V::NAME),
        product_of<Tiles<Q3_K<V>>>(V::NAME),
        product_of<Tiles<Q4_K<V>>>(V::NAME),
        product_of<Tiles<Q5_K<V>>>(V::NAME),
        product_of<Tiles<Q6_K<V>>>(V::NAME),
        product_of<Tiles<IQ4_XS<V>>>(V::NAME),
    };
    return {PRODUCTS, sizeof PRODUCTS / sizeof PRODUCTS[0]};
}

} // namespace
} // namespace dfl::cpu
