// DeltaHeadKernel for vectors of V::T floats.
#pragma once

#include "cpu/delta_net/delta_scan_any.h"
#include "cpu/delta_net/delta_scan_lanes.h"
#include "cpu/delta_net/delta_scan_rows.h"
#include "cpu/simd/parts_of_rows.h"

#include <cmath>

namespace dfl::cpu {
namespace {

template <class V>
struct DeltaHeadTiles {
    using F = typename V::F;
    using Part = PartsOfRows<V>;
    static constexpr int T = V::T;

    static F silu(F x) {
        const F e = falling(x), one = V::spread(1.0f);
        return V::divide(V::mul(x, V::where_negative(x, e, one)), V::add(one, e));
    }

    static void convolve(const DeltaConvolution & work) {
        const int64_t d = work.d, before = work.d_conv - 1;
        float kernel[MAX_DELTA_TAPS * MAX_DELTA_HEAD];
        for (int64_t c = 0; c < d; ++c) {
            for (int64_t t = 0; t < work.d_conv; ++t) {
                kernel[t * d + c] = work.kernel[c * work.d_conv + t];
            }
        }
        for (int64_t i = 0; i < work.n; ++i) {
            const float * under[MAX_DELTA_TAPS];
            for (int64_t t = 0; t < work.d_conv; ++t) {
                const int64_t row = work.taps != nullptr ? work.taps[t * work.n + i] : i + t;
                under[t] = row < before ? work.past + row * work.past_row
                                        : work.u + (row - before) * work.u_row;
            }
            float * out = work.out + i * work.out_row;
            for (int64_t c = 0; c < d; c += T) {
                F sum = V::mul(Part::load(under[0], c, d), Part::load(kernel, c, d));
                for (int64_t t = 1; t < work.d_conv; ++t) {
                    sum = V::mul_add(Part::load(under[t], c, d), Part::load(kernel + t * d, c, d),
                                     sum);
                }
                Part::store(out, c, d, silu(sum));
            }
        }
    }

    static float dot(const float * a, const float * b, int64_t d) {
        F sum[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
        for (int64_t c = 0; c < d; c += T) {
            sum[0] = V::mul_add(Part::load(a, c, d), Part::load(b, c, d), sum[0]);
        }
        float total[4];
        V::sums(sum, total);
        return total[0];
    }

    static void scale(const float * x, int64_t d, float length, float eps, float * to) {
        const F by = V::spread(length / std::sqrt(dot(x, x, d) + eps));
        for (int64_t c = 0; c < d; c += T) {
            Part::store(to, c, d, V::mul(by, Part::load(x, c, d)));
        }
    }

    static void gate(const DeltaGate & work) {
        const int64_t d = work.d;
        const float mean = dot(work.out, work.out, d) / static_cast<float>(d);
        const F by = V::spread(1.0f / std::sqrt(mean + work.eps));
        for (int64_t c = 0; c < d; c += T) {
            const F x = Part::load(work.out, c, d), weight = Part::load(work.weight, c, d);
            const F gate = silu(Part::load(work.gate, c, d));
            Part::store(work.out, c, d, V::mul(V::mul(V::mul(by, x), weight), gate));
        }
    }

    // Returns ln(1 + u) for u in [0, 1], by the series of 2 artanh(u / (2 + u)).
    static F log_1_plus(F u) {
        const F s = V::divide(u, V::add(V::spread(2.0f), u)), s2 = V::mul(s, s);
        F sum = V::spread(1.0f / 15);
        for (const float c : {1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f}) {
            sum = V::mul_add(sum, s2, V::spread(c));
        }
        return V::mul(V::add(s, s), sum);
    }

    // Returns exp(-|x|), which cannot overflow.
    static F falling(F x) { return V::exp(V::where_negative(x, x, V::sub(V::zero(), x))); }

    static void gates(const DeltaGates & work) {
        const F one = V::spread(1.0f);
        for (int64_t i = 0; i < DELTA_GATES; i += T) {
            const F x = V::add(V::load(work.x + i), V::spread(work.bias));
            const F softplus = V::add(V::max(x, V::zero()), log_1_plus(falling(x)));
            // V::exp needs an exponent <= 0, which a * softplus is, because `a` is negative.
            V::store(work.decay + i, V::exp(V::mul(V::spread(work.a), softplus)));
            const F y = V::load(work.y + i), e = falling(y);
            V::store(work.beta + i, V::divide(V::where_negative(y, e, one), V::add(one, e)));
        }
    }

    static int64_t scratch_size(int64_t d, int64_t n) {
        return T * d * n; // room for T rows of each node's state, d floats each
    }

    template <int N>
    static void scan_heads(const DeltaScan & work, float * scratch) {
        constexpr int64_t worth_turning = 4; // node count from which transposing the state pays
        if (work.n < worth_turning) {
            DeltaScanRows<V, N>::scan(work, scratch);
        } else {
            DeltaScanLanes<V, N>::scan(work, scratch);
        }
    }

    static void scan(const DeltaScan & work, float * scratch) {
        if constexpr (V::HAS_REGISTERS) { // whole rows of the state fit into registers
            switch (work.d) {
            case T:
                return scan_heads<1>(work, scratch);
            case 2 * T:
                return scan_heads<2>(work, scratch);
            case 4 * T:
                return scan_heads<4>(work, scratch);
            case 8 * T:
                return scan_heads<8>(work, scratch);
            case 16 * T:
                return scan_heads<16>(work, scratch);
            default:
                break;
            }
        }
        DeltaScanAny<V>::scan(work, scratch);
    }

    static constexpr DeltaHeadKernel KERNEL = {convolve, scale, dot,  scratch_size,
                                               scan,     gate,  gates};
};

} // namespace
} // namespace dfl::cpu
