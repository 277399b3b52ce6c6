// Weights multiplied in the file's layout: rows as ggml stores them, at any address. Everything
// in here has internal linkage: each instruction set compiles its own, and none may stand in for
// another's.
#pragma once

#include "cpu/matmul/product_lists.h"

#include <algorithm>
#include <cstring>

namespace dfl::cpu {
namespace {

// Rows of whole blocks of INPUTS.
template <ggml_type OF, int INPUTS>
struct RowsInPlace {
    static constexpr ggml_type TYPE = OF;
    static constexpr int TILE = 16, BLOCK = INPUTS;
    static constexpr bool IN_PLACE = true;

    static size_t packed_size(int64_t n_in, int64_t n_out) {
        return n_in > 0 && n_out > 0 && n_in % BLOCK == 0 ? ggml_row_size(OF, n_in) * n_out : 0;
    }

    static void pack(const void * rows, int64_t n_in, int64_t n_out, int64_t first_tile,
                     int64_t last_tile, void * packed) {
        const int64_t first = std::min(first_tile * TILE, n_out);
        const int64_t last = std::min(last_tile * TILE, n_out);
        const size_t size = ggml_row_size(OF, n_in);
        std::memcpy(static_cast<char *>(packed) + first * size,
                    static_cast<const char *>(rows) + first * size, (last - first) * size);
    }
};

} // namespace
} // namespace dfl::cpu
