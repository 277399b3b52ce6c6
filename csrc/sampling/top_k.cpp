#include "sampling/top_k.h"

#include "cpu/rows/row_kernel.h"

#include <algorithm>
#include <cfloat>
#include <functional>

namespace dfl {

bool all_finite(const float * logits, int64_t n) {
    int n_not_finite = 0; // counts all: a loop with an early exit is not vectorised
    for (int64_t i = 0; i < n; ++i) {
        n_not_finite += !(logits[i] < INFINITY);
    }
    return n_not_finite == 0;
}

int64_t first_largest(const float * x, int64_t n) { return cpu::row_kernel()->first_largest(x, n); }

Maxima::Maxima(const float * x, int64_t n)
    : of_blocks((n + cpu::BLOCK - 1) / cpu::BLOCK),
      is_finite(cpu::row_kernel()->maxima(x, n, of_blocks.data())) {}

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
    // The k-th largest block maximum is a lower bound of the k best values. Rows under a mask may
    // have fewer than k finite values: the others are -inf, of which the first are the best.
    float bound = -FLT_MAX;
    if (k < static_cast<int64_t>(maxima.of_blocks.size())) {
        std::vector<float> ranked = maxima.of_blocks;
        std::nth_element(ranked.begin(), ranked.begin() + (k - 1), ranked.end(), std::greater<>());
        bound = std::max(bound, ranked[k - 1]);
    }
    const auto first = static_cast<std::ptrdiff_t>(out.size());
    append_unordered(x, n, bound, maxima, out);
    for (int64_t i = 0; static_cast<int64_t>(out.size()) < first + k; ++i) {
        if (x[i] == -INFINITY) {
            out.push_back({static_cast<int32_t>(i), x[i]});
        }
    }
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
    if (maxima.is_finite) {
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

} // namespace dfl
