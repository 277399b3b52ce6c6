// Selection of the largest logits of each row by nodes of a graph.
#pragma once

#include <cstdint>
#include <ggml.h>
#include <vector>

namespace dfl {

// The k largest values of each row. ggml's CUDA backend sorts a whole row on one multiprocessor,
// which is slow for a vocabulary; only the k blocks with the largest maxima can hold them.
struct TopRows {
    struct Level {
        ggml_tensor * blocks; // the k blocks to search in each row, i32 [k, n_rows]
        int64_t width;        // number of values of one block
    };
    std::vector<Level> levels;
    // Indices of the k largest values within the last level's blocks, or the row: [k, n_rows].
    ggml_tensor * last = nullptr;

    // Returns the selected values of each row, f32 [1, k, n_rows]; values: [n, n_rows].
    ggml_tensor * gather(ggml_context * ctx, ggml_tensor * values) const;
    // Returns the column in [0, n) of selected value i < k * n_rows. blocks, last: host copies.
    int64_t index_of(const std::vector<const int32_t *> & blocks, const int32_t * last,
                     int64_t i) const;
};

ggml_tensor * clamp_to_finite(ggml_context * ctx, ggml_tensor * logits);

// Selects the k largest values of each row of f32 [n, n_rows] without NaNs, as whole rows or
// blocks.
TopRows make_top_rows(ggml_context * ctx, ggml_tensor * values, int64_t k, bool by_blocks);

} // namespace dfl
