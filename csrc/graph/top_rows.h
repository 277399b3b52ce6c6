// The largest logits of rows, found by nodes of a graph.
#pragma once

#include <cstdint>
#include <ggml.h>
#include <vector>

namespace dfl {

// The k largest of long rows, as a device finds them.
//
// ggml's CUDA backend sorts a row whole, one multiprocessor to a row: about a millisecond for a
// vocabulary, of a draft that takes two. The k largest lie in the k blocks with the largest maxima,
// so few values are left to sort: blocks that fit into one bitonic sort.
struct TopRows {
    struct Level {
        ggml_tensor * blocks; // i32 [k, n_rows]: the blocks that are looked at further
        int64_t width;        // values of a block
    };
    std::vector<Level> levels;
    ggml_tensor * last = nullptr; // i32 [k, n_rows]: places among the values of the last blocks

    // Of each row the values at the places found, f32 [1, k, n_rows]; values: [n, n_rows].
    ggml_tensor * gather(ggml_context * ctx, ggml_tensor * values) const;
    // The place in its row of a result: i of k * n_rows. The arrays: what `levels` and `last` held.
    int64_t index_of(const std::vector<std::vector<int32_t>> & blocks,
                     const std::vector<int32_t> & last, int64_t i) const;
};

// The same tensor clamped to finite values.
ggml_tensor * clamp_to_finite(ggml_context * ctx, ggml_tensor * logits);

// values: f32 [n, n_rows] without NaNs. by_blocks false: whole rows are sorted as the device does.
TopRows make_top_rows(ggml_context * ctx, ggml_tensor * values, int64_t k, bool by_blocks);

} // namespace dfl
