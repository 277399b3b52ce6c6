// The products of each instruction set, a source file compiled for each. None where the compiler
// or the machine built for lacks it; whether this CPU has it is packed_product()'s to ask.
#pragma once

#include "cpu/matmul/packed_product.h"

namespace dfl::cpu {

struct PackedProducts {
    const PackedProduct * list;
    int n;
};

PackedProducts avx512vnni_products();
PackedProducts avxvnni_products();
PackedProducts avx2_products();
PackedProducts avx512bf16_float_products();
PackedProducts avx512_float_products();
PackedProducts avx2_float_products();
PackedProducts portable_float_products();
// By the dot products of ggml's CPU backend, where they are found in the process.
PackedProducts ggml_dots();

// A product with the functions and constants of `All`.
template <class All>
constexpr PackedProduct product_of(const char * name) {
    return {name,
            All::TYPE,
            All::TILE,
            All::BLOCK,
            All::packed_size,
            All::pack,
            All::quantized_row_size,
            All::quantize_row,
            All::multiply,
            All::IN_PLACE};
}

// Whether this CPU's cores are of AMD's family of Zen 3 and Zen 4.
bool on_zen4();

} // namespace dfl::cpu
