// Weights multiplied as ggml stores them: rows at any address. Everything has internal linkage: the
// linker must not merge copies for different instruction sets.
#pragma once

#include "cpu/matmul/product_lists.h"

#include <algorithm>
#include <cstring>

namespace dfl::cpu {
namespace {

// Packs weights by a copy; a row is whole blocks of INPUTS weights.
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
