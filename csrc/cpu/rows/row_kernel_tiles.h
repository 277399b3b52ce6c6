// RowKernel for vectors of V::T floats.
#pragma once

#include "cpu/rows/row_kernel.h"
#include "cpu/simd/parts_of_rows.h"

#include <algorithm>
#include <cmath>

namespace dfl::cpu {
namespace {

template <class V>
struct RowTiles {
    using F = typename V::F;
    using Part = PartsOfRows<V>;
    static constexpr int T = V::T;

    static float sum_of_squares(const float * x, int64_t n) {
        F sum[4] = {V::zero(), V::zero(), V::zero(), V::zero()}; // four sums hide add latency
        for (int64_t i = 0; i < n; i += T) {
            const F value = Part::load(x, i, n);
            F & at = sum[i / T % 4];
            at = V::mul_add(value, value, at);
        }
        float total[4];
        V::sums(sum, total);
        return (total[0] + total[1]) + (total[2] + total[3]);
    }

    static void norm(const float * x, int64_t n, const float * weight, float eps, float * to) {
        const float mean = sum_of_squares(x, n) / static_cast<float>(n);
        const F by = V::spread(1.0f / std::sqrt(mean + eps));
        for (int64_t i = 0; i < n; i += T) {
            Part::store(to, i, n,
                        V::mul(V::mul(by, Part::load(x, i, n)), Part::load(weight, i, n)));
        }
    }

    static F sigmoid(F x) {
        const F e = V::exp(V::where_negative(x, x, V::sub(V::zero(), x)));
        const F one = V::spread(1.0f);
        return V::divide(V::where_negative(x, e, one), V::add(one, e));
    }

    static void swiglu(const float * gate, const float * up, int64_t n, float * to) {
        for (int64_t i = 0; i < n; i += T) {
            const F x = V::load(gate + i);
            V::store(to + i, V::mul(V::mul(x, sigmoid(x)), V::load(up + i)));
        }
    }

    static void gated(const float * x, const float * gate, int64_t n, float * to) {
        for (int64_t i = 0; i < n; i += T) {
            V::store(to + i, V::mul(V::load(x + i), sigmoid(V::load(gate + i))));
        }
    }

    static void rotate(const HeadRotation & work, float * to) {
        if (work.weight != nullptr) {
            norm(work.x, work.d, work.weight, work.eps, to);
        } else {
            std::copy_n(work.x, work.d, to);
        }
        const int64_t half = work.n_rotated / 2;
        if (work.pairs && work.n_rotated % T == 0) {
            for (int64_t i = 0; i < work.n_rotated; i += T) {
                const F x = V::load(to + i), rotated = V::load(work.rotated + i);
                V::store(to + i, V::sub_add(V::mul(x, V::even(rotated)),
                                            V::mul(V::swapped(x), V::odd(rotated))));
            }
            return;
        }
        if (!work.pairs && half % T == 0) {
            for (int64_t i = 0; i < half; i += T) {
                const F a = V::load(to + i), b = V::load(to + half + i);
                const F cosine = V::load(work.rotated + i), sine = V::load(work.rotated + half + i);
                V::store(to + i, V::sub(V::mul(a, cosine), V::mul(b, sine)));
                V::store(to + half + i, V::add(V::mul(a, sine), V::mul(b, cosine)));
            }
            return;
        }
        const int64_t step = work.pairs ? 2 : 1, apart = work.pairs ? 1 : half;
        for (int64_t i = 0; i < half; ++i) {
            float &a = to[step * i], &b = to[step * i + apart];
            const float cosine = work.rotated[step * i], sine = work.rotated[step * i + apart];
            const float first = a * cosine - b * sine;
            b = a * sine + b * cosine;
            a = first;
        }
    }

    static void to_half(const float * x, int64_t n, uint16_t * to) {
        int64_t i = 0;
        for (; i + T <= n; i += T) {
            V::store_halves(to + i, V::load(x + i));
        }
        if (i < n) {
            uint16_t rest[T];
            V::store_halves(rest, Part::load(x, i, n));
            std::copy_n(rest, n - i, to + i);
        }
    }

    // Returns tanh(x) with a relative error of at most 3e-7; NaN for NaN.
    static F tanh(F x) {
        const F size = V::where_negative(x, V::sub(V::zero(), x), x), one = V::spread(1.0f);
        const F e = V::exp(V::mul(size, V::spread(-2.0f)));
        const F far = V::divide(V::sub(one, e), V::add(one, e));
        // tanh(|x|) = (1 - e) / (1 + e) with e = exp(-2 |x|) loses digits near 0, so for |x| <
        // bound tanh(x) comes from a polynomial fitted to (tanh(x) / x - 1) / x^2.
        constexpr float bound = 0.6f;
        const F square = V::mul(x, x);
        F p = V::spread(-0.0062763877f);
        for (const float c : {0.021116214f, -0.053875137f, 0.13332924f, -0.33333331f}) {
            p = V::mul_add(p, square, V::spread(c));
        }
        const F near = V::mul_add(V::mul(x, square), p, x);
        return V::where_negative(V::sub(size, V::spread(bound)), near,
                                 V::where_negative(x, V::sub(V::zero(), far), far));
    }

    static void cap(const float * x, int64_t n, float scale, float cap, float * to) {
        for (int64_t i = 0; i < n; i += T) {
            const F part = V::mul(Part::load(x, i, n), V::spread(scale));
            Part::store(to, i, n, V::mul(tanh(part), V::spread(cap)));
        }
    }

    // Returns the largest of n values, n a multiple of T; -inf if all are NaN.
    static float largest(const float * x, int64_t n) {
        F maximum = V::spread(-INFINITY);
        for (int64_t i = 0; i < n; i += T) {
            maximum = V::max(V::load(x + i), maximum);
        }
        float lanes[T];
        V::store(lanes, maximum);
        return *std::max_element(lanes, lanes + T);
    }

    static int64_t first_largest(const float * x, int64_t n) {
        constexpr int64_t block = 32 * T;
        float maximum = -INFINITY;
        int64_t at = 0, size = 0;
        for (int64_t i = 0; i < n; i += block) {
            const int64_t here = std::min(block, n - i), whole = here / T * T;
            float top = largest(x + i, whole);
            for (int64_t j = whole; j < here; ++j) {
                top = x[i + j] > top ? x[i + j] : top;
            }
            if (top > maximum || size == 0) {
                maximum = top;
                at = i;
                size = here;
            }
        }
        const float * index = std::find(x + at, x + at + size, maximum);
        return index == x + at + size ? n : index - x;
    }

    static float log_sum_exp(const float * x, int64_t n) {
        const int64_t at = first_largest(x, n);
        if (at == n || !std::isfinite(x[at])) {
            return NAN;
        }
        const float maximum = x[at];
        const int64_t whole = n / T * T;
        F sum[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
        for (int64_t i = 0; i < whole; i += T) {
            F & to = sum[i / T % 4];
            to = V::add(to, V::exp(V::sub(V::load(x + i), V::spread(maximum))));
        }
        float sums[4];
        V::sums(sum, sums);
        float total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        for (int64_t i = whole; i < n; ++i) {
            total += std::exp(x[i] - maximum);
        }
        return maximum + std::log(total);
    }

    static bool maxima(const float * x, int64_t n, float * max) {
        const int64_t whole = n / BLOCK * BLOCK;
        int n_not_finite = 0; // counts NaN and +inf: a loop that stops early is not vectorised
        for (int64_t i = 0; i < whole; i += BLOCK) {
            max[i / BLOCK] = largest(x + i, BLOCK);
            for (int64_t j = i; j < i + BLOCK; ++j) {
                n_not_finite += !(x[j] < INFINITY);
            }
        }
        if (whole < n) {
            float top = -INFINITY;
            for (int64_t j = whole; j < n; ++j) {
                top = x[j] > top ? x[j] : top;
                n_not_finite += !(x[j] < INFINITY);
            }
            max[whole / BLOCK] = top;
        }
        return n_not_finite == 0;
    }

    static double sum_exp(const float * x, int64_t n, float max) {
        constexpr int64_t part = 64 * T; // values summed as floats before a double adds the sum
        double total = 0.0;
        for (int64_t from = 0; from < n; from += part) {
            const int64_t end = std::min(n, from + part), whole = from + (end - from) / T * T;
            F sum[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
            for (int64_t i = from; i < whole; i += T) {
                F & to = sum[i / T % 4];
                to = V::add(to, V::exp(V::sub(V::load(x + i), V::spread(max))));
            }
            float sums[4];
            V::sums(sum, sums);
            for (const float one : sums) {
                total += one;
            }
            for (int64_t i = whole; i < end; ++i) {
                total += std::exp(x[i] - max);
            }
        }
        return total;
    }

    static uint64_t noise(uint64_t state, uint64_t first, int64_t n, uint64_t * bits) {
        uint64_t maximum = 0;
        for (int64_t i = 0; i < n; ++i) {
            uint64_t z = state + (first + static_cast<uint64_t>(i) + 1) * 0x9E3779B97F4A7C15u;
            z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
            z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
            z = (z ^ (z >> 31)) >> 12;
            bits[i] = z;
            maximum = z > maximum ? z : maximum;
        }
        return maximum;
    }

    static constexpr RowKernel KERNEL = {T,   norm,          swiglu,      gated,  rotate,  to_half,
                                         cap, first_largest, log_sum_exp, maxima, sum_exp, noise};
};

} // namespace
} // namespace dfl::cpu
