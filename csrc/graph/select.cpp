#include "graph/select.h"

#include "cpu/row_kernel.h"

#include <algorithm>
#include <cfloat>
#include <functional>

namespace dfl {

bool all_finite(const float * logits, int64_t n) {
    int n_others = 0; // counted, as a loop that may end early uses no vector registers
    for (int64_t i = 0; i < n; ++i) {
        n_others += !(logits[i] < INFINITY);
    }
    return n_others == 0;
}

int64_t first_largest(const float * x, int64_t n) { return cpu::row_kernel()->first_largest(x, n); }

Maxima::Maxima(const float * x, int64_t n)
    : of_blocks((n + cpu::BLOCK - 1) / cpu::BLOCK),
      is_sound(cpu::row_kernel()->maxima(x, n, of_blocks.data())) {}

float Maxima::largest() const { return *std::max_element(of_blocks.begin(), of_blocks.end()); }

static void append_unordered(const float * x, int64_t n, float bound, const Maxima & maxima,
                             std::vector<Candidate> & out) {
    for (size_t block = 0; block < maxima.of_blocks.size(); ++block) {
        if (maxima.of_blocks[block] < bound) {
            continue;
        }
        const int64_t from = static_cast<int64_t>(block) * cpu::BLOCK;
        for (int64_t i = from; i < std::min(n, from + cpu::BLOCK); ++i) {
            if (x[i] >= bound) {
                out.push_back({static_cast<int32_t>(i), x[i]});
            }
        }
    }
}

void append_from(const float * x, int64_t n, float bound, const Maxima & maxima,
                 std::vector<Candidate> & out) {
    const auto first = static_cast<std::ptrdiff_t>(out.size());
    append_unordered(x, n, bound, maxima, out);
    std::sort(out.begin() + first, out.end(), is_better);
}

void append_best(const float * x, int64_t n, int64_t k, const Maxima & maxima,
                 std::vector<Candidate> & out) {
    // So many blocks reach the k-th largest of their maxima, and so at least so many values.
    float bound = -INFINITY;
    if (k < static_cast<int64_t>(maxima.of_blocks.size())) {
        std::vector<float> most = maxima.of_blocks;
        std::nth_element(most.begin(), most.begin() + (k - 1), most.end(), std::greater<>());
        bound = most[k - 1];
    }
    const auto first = static_cast<std::ptrdiff_t>(out.size());
    append_unordered(x, n, bound, maxima, out);
    std::partial_sort(out.begin() + first, out.begin() + first + k, out.end(), is_better);
    out.resize(first + k);
}

void append_best(const float * x, int64_t n, int64_t k, std::vector<Candidate> & out) {
    if (k == 1) {
        const int64_t top = std::min(first_largest(x, n), n - 1);
        out.push_back({static_cast<int32_t>(top), x[top]});
        return;
    }
    const Maxima maxima(x, n);
    if (maxima.is_sound) {
        append_best(x, n, k, maxima, out);
        return;
    }
    std::vector<Candidate> all(n);
    for (int64_t i = 0; i < n; ++i) {
        all[i] = {static_cast<int32_t>(i), x[i]};
    }
    std::partial_sort(all.begin(), all.begin() + k, all.end(), is_better);
    out.insert(out.end(), all.begin(), all.begin() + k);
}

// Values that one bitonic sort of ggml's CUDA backend takes.
static constexpr int64_t MOST_SORTED = 1024;

// Among scores that are no numbers Vulkan's selection reads where nothing is, and names rows that
// do not exist; CUDA's argmax finds none where none is above the lowest float.
ggml_tensor * without_nans(ggml_context * ctx, ggml_tensor * logits) {
    return ggml_clamp(ctx, logits, -FLT_MAX / 2, FLT_MAX / 2);
}

// Values of a block: the fewest that leave a sort's worth of blocks, else the most there may be. 0:
// the row cannot be cut, or that would leave as much to do.
static int64_t block_width(int64_t n, int64_t k) {
    int64_t best = 0;
    for (int64_t width = 512; width >= 32; width /= 2) {
        const bool cuts = n % width == 0 && n / width > 2 * k;
        best = cuts && (best == 0 || n / width <= MOST_SORTED) ? width : best;
    }
    return best;
}

// f32 [width * k, n_rows]: of each row these blocks, one after the other.
static ggml_tensor * blocks_of(ggml_context * ctx, ggml_tensor * values, int64_t width,
                               ggml_tensor * blocks) {
    const int64_t n_rows = values->ne[1];
    ggml_tensor * cut = ggml_reshape_3d(ctx, values, width, values->ne[0] / width, n_rows);
    ggml_tensor * found = ggml_get_rows(ctx, cut, blocks);
    return ggml_reshape_2d(ctx, found, width * blocks->ne[0], n_rows);
}

// f32 [n / width, n_rows]: the largest of each block.
static ggml_tensor * maxima(ggml_context * ctx, ggml_tensor * values, int64_t width) {
    const int64_t n_blocks = values->ne[0] / width, n_rows = values->ne[1];
    ggml_tensor * at = ggml_argmax(ctx, ggml_reshape_2d(ctx, values, width, n_blocks * n_rows));
    ggml_tensor * each = ggml_reshape_3d(ctx, values, 1, width, n_blocks * n_rows);
    ggml_tensor * found = ggml_get_rows(ctx, each, ggml_reshape_2d(ctx, at, 1, n_blocks * n_rows));
    return ggml_reshape_2d(ctx, found, n_blocks, n_rows);
}

TopRows find_top(ggml_context * ctx, ggml_tensor * values, int64_t k, bool by_blocks) {
    TopRows top;
    if (by_blocks && k == 1) {
        top.last = ggml_reshape_2d(ctx, ggml_argmax(ctx, values), 1, values->ne[1]);
        return top;
    }
    while (by_blocks && values->ne[0] > MOST_SORTED) {
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

int64_t TopRows::place(const std::vector<std::vector<int32_t>> & blocks,
                       const std::vector<int32_t> & last, int64_t i) const {
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
