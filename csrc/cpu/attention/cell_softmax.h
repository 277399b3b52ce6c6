// Online softmax of attention, with a running maximum; merges segments' partial results.
#pragma once

#include "cpu/attention/cell_attention.h"
#include "cpu/attention/cell_values.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace dfl::cpu {
namespace {

template <class V>
struct CellSoftmax {
    using F = typename V::F;
    static constexpr int T = V::T;
    static constexpr int BLOCK = CELL_BLOCK;
    static_assert(BLOCK % (4 * T) == 0);

    static float exp_of(float x) {
        float lanes[T];
        V::store(lanes, V::exp(V::spread(x)));
        return lanes[0];
    }

    static void scale_sum(float * sum, int64_t width, float by) {
        for (int64_t j = 0; j < width; j += T) {
            V::store(sum + j, V::mul(V::load(sum + j), V::spread(by)));
        }
    }

    // Returns the maximum to subtract from scores; 0 for a maximum of -inf, as -inf - -inf is NaN.
    static float top_of(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

    // Returns the largest of scores [first, end); sets other scores in the same vectors to -inf.
    static float largest_of(float * scores, int64_t first, int64_t end) {
        const int64_t begin = first / T * T, stop = CellValues<V>::padded(end);
        std::fill(scores + begin, scores + first, -INFINITY);
        std::fill(scores + end, scores + stop, -INFINITY);
        F largest = V::load(scores + begin);
        for (int64_t c = begin + T; c < stop; c += T) {
            largest = V::max(largest, V::load(scores + c));
        }
        return V::largest(largest);
    }

    // Turns scores [first, end) into softmax weights. If the maximum grows, rescales `total`, the
    // sum of weights, and `sum`, the weighted sum of values.
    static void weigh(float * scores, int64_t first, int64_t end, float largest, float & maximum,
                      float & total, float * sum, int64_t width) {
        if (largest > maximum) {
            const float by = exp_of(maximum - largest);
            total *= by;
            scale_sum(sum, width, by);
            maximum = largest;
        }
        const int64_t begin = first / T * T, stop = CellValues<V>::padded(end);
        const F top = V::spread(top_of(maximum));
        F sums[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
        for (int c = 0; c < BLOCK; c += 4 * T) {
            for (int i = 0; i < 4; ++i) {
                const int64_t at = c + i * T;
                if (at >= begin && at < stop) {
                    const F weight = V::exp(V::sub(V::load(scores + at), top));
                    V::store(scores + at, weight);
                    sums[i] = V::add(sums[i], weight);
                }
            }
        }
        float added[4];
        V::sums(sums, added);
        total += (added[0] + added[1]) + (added[2] + added[3]);
    }

    static bool is_empty(float maximum, float total) {
        return maximum == -INFINITY && total == 0.0f;
    }

    // Merges a segment's partial result into the result of earlier segments.
    static void fold(float maximum, float total, const float * sum, float & all_maximum,
                     float & all_total, float * all_sum, int64_t width) {
        if (is_empty(maximum, total)) {
            return;
        }
        if (is_empty(all_maximum, all_total)) {
            all_maximum = maximum;
            all_total = total;
            std::copy(sum, sum + width, all_sum);
            return;
        }
        const float top = top_of(maximum > all_maximum ? maximum : all_maximum);
        const float before = exp_of(all_maximum - top), now = exp_of(maximum - top);
        all_total = all_total * before + total * now;
        for (int64_t j = 0; j < width; j += T) {
            const F scaled = V::mul(V::load(all_sum + j), V::spread(before));
            V::store(all_sum + j, V::add(scaled, V::mul(V::load(sum + j), V::spread(now))));
        }
        all_maximum = maximum > all_maximum ? maximum : all_maximum;
    }

    static void finish(const CellAttention & work, int64_t query, float maximum, float total,
                       float * sum, int64_t width) {
        const int64_t row = query / work.n_group, head = query % work.n_group;
        if (work.sinks != nullptr) {
            const float sink = work.sinks[head];
            if (sink > maximum) {
                const float by = exp_of(maximum - sink);
                total = total * by + 1.0f;
                scale_sum(sum, width, by);
            } else {
                total += exp_of(sink - maximum);
            }
        }
        for (int64_t j = 0; j < width; j += T) {
            V::store(sum + j, V::divide(V::load(sum + j), V::spread(total)));
        }
        std::memcpy(work.out + row * work.out_row + head * work.head_dim, sum,
                    work.head_dim * sizeof(float));
    }
};

} // namespace
} // namespace dfl::cpu
