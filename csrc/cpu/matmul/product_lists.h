// Lists of products.
#pragma once

#include "cpu/matmul/packed_product.h"

namespace dfl::cpu {

struct PackedProducts {
    const PackedProduct * list;
    int n;
};

// By the dot products of ggml's CPU backend, where they are found in the process.
PackedProducts ggml_dots();

// A product with the functions and constants of `All`.
template <class All>
constexpr PackedProduct product_of(const char * set) {
    return {set,
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

// Returns true on AMD's Zen 4.
bool on_zen4();

} // namespace dfl::cpu
