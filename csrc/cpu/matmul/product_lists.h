// Lists of PackedProducts: the kernels that multiply rows with weights of each type.
#pragma once

#include "cpu/matmul/packed_product.h"

namespace dfl::cpu {

struct PackedProducts {
    const PackedProduct * list;
    int n;
};

// Returns products that ggml's CPU backend computes; none if the backend is not found.
PackedProducts ggml_dots();

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

bool on_zen4();

} // namespace dfl::cpu
