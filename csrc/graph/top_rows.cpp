#include "graph/top_rows.h"

#include <algorithm>
#include <cfloat>

namespace dfl {

// Number of values that one bitonic sort of ggml's CUDA backend takes.
static constexpr int64_t MAX_SORTED = 1024;

// Clamps, as NaNs make Vulkan's top-k read out of bounds and return rows that do not exist, and
// CUDA's argmax returns no row if all values are -inf.
ggml_tensor * clamp_to_finite(ggml_context * ctx, ggml_tensor * logits) {
    return ggml_clamp(ctx, logits, -FLT_MAX / 2, FLT_MAX / 2);
}

// Returns the width of the blocks in which k values are sought: the smallest with at most
// MAX_SORTED blocks, else the largest that leaves more than 2 * k blocks; 0: the row cannot be
// divided.
static int64_t block_width(int64_t n, int64_t k) {
    int64_t best = 0;
    for (int64_t width = 512; width >= 32; width /= 2) {
        const bool cuts = n % width == 0 && n / width > 2 * k;
        best = cuts && (best == 0 || n / width <= MAX_SORTED) ? width : best;
    }
    return best;
}

// Returns the values of the given blocks of each row: f32 [width * k, n_rows].
static ggml_tensor * blocks_of(ggml_context * ctx, ggml_tensor * values, int64_t width,
                               ggml_tensor * blocks) {
    const int64_t n_rows = values->ne[1];
    ggml_tensor * cut = ggml_reshape_3d(ctx, values, width, values->ne[0] / width, n_rows);
    ggml_tensor * rows = ggml_get_rows(ctx, cut, blocks);
    return ggml_reshape_2d(ctx, rows, width * blocks->ne[0], n_rows);
}

// Returns the maximum of each block of each row: f32 [n / width, n_rows].
static ggml_tensor * maxima(ggml_context * ctx, ggml_tensor * values, int64_t width) {
    const int64_t n_blocks = values->ne[0] / width, n_rows = values->ne[1];
    ggml_tensor * at = ggml_argmax(ctx, ggml_reshape_2d(ctx, values, width, n_blocks * n_rows));
    ggml_tensor * each = ggml_reshape_3d(ctx, values, 1, width, n_blocks * n_rows);
    ggml_tensor * largest =
        ggml_get_rows(ctx, each, ggml_reshape_2d(ctx, at, 1, n_blocks * n_rows));
    return ggml_reshape_2d(ctx, largest, n_blocks, n_rows);
}

TopRows make_top_rows(ggml_context * ctx, ggml_tensor * values, int64_t k, bool by_blocks) {
    TopRows top;
    if (by_blocks && k == 1) {
        top.last = ggml_reshape_2d(ctx, ggml_argmax(ctx, values), 1, values->ne[1]);
        return top;
    }
    while (by_blocks && values->ne[0] > MAX_SORTED) {
        const int64_t width = block_width(values->ne[0], k);
        if (width == 0) {
            break;
        }
        ggml_tensor * blocks = ggml_top_k(ctx, maxima(ctx, values, width), static_cast<int>(k));
        top.levels.push_back({blocks, width});
        values = blocks_of(ctx, values, width, blocks);
    }
    top.last = ggml_top_k(ctx, values, static_cast<int>(k));
    return top;
}

ggml_tensor * TopRows::gather(ggml_context * ctx, ggml_tensor * values) const {
    for (const Level & level : levels) {
        values = blocks_of(ctx, values, level.width, level.blocks);
    }
    return ggml_get_rows(ctx, ggml_reshape_3d(ctx, values, 1, values->ne[0], values->ne[1]), last);
}

int64_t TopRows::index_of(const std::vector<const int32_t *> & blocks, const int32_t * last,
                          int64_t i) const {
    const int64_t k = this->last->ne[0], first = i / k * k;
    int64_t at = last[i];
    for (size_t level = levels.size(); level-- > 0;) {
        const int64_t width = levels[level].width;
        const int64_t chosen = std::clamp<int64_t>(at / width, 0, k - 1);
        at = blocks[level][first + chosen] * width + at % width;
    }
    return at;
}

} // namespace dfl
