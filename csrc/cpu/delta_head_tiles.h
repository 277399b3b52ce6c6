// The loops of DeltaHeadKernel over vectors of V::T floats.
#pragma once

#include "delta_head.h"

#include <algorithm>
#include <cmath>

namespace dfl::cpu {
namespace {

// For heads of N vectors: rows of the state (the keys' weights in one value) do not touch each
// other, so a few of them walk the whole tree in registers.
template <class V, int N>
struct DeltaWalkTiles {
    using F = typename V::F;
    static constexpr int D = N * V::T;
    static constexpr int R = N <= 4 ? 4 : 2; // state rows at once
    using Rows = F[R][N];

    static void load(Rows & m, const float * from) {
        for (int r = 0; r < R; ++r) {
            for (int i = 0; i < N; ++i) {
                m[r][i] = V::load(from + r * D + i * V::T);
            }
        }
    }

    static void store(const Rows & m, float * to) {
        for (int r = 0; r < R; ++r) {
            for (int i = 0; i < N; ++i) {
                V::store(to + r * D + i * V::T, m[r][i]);
            }
        }
    }

    // Each row's product with x.
    static void products(const Rows & m, const float * x, float * to) {
        static_assert(R == 2 || R == 4);
        F sum[4];
        std::fill(sum, sum + 4, V::zero());
        for (int i = 0; i < N; ++i) {
            const F value = V::load(x + i * V::T);
            // Two sums a row where there are few rows: a sum waits for the one before.
            for (int r = 0; r < R; ++r) {
                F & at = sum[R == 4 ? r : 2 * r + i % 2];
                at = V::mul_add(m[r][i], value, at);
            }
        }
        V::sums(sum, to);
        if (R == 2) {
            to[0] += to[1];
            to[1] = to[2] + to[3];
        }
    }

    // Rows [row, row + R) of the state. seen: room for R rows of every node's.
    template <bool ANSWERS>
    static void walk_rows(const DeltaWalk & work, int64_t row, float * seen) {
        Rows m;
        load(m, work.state + row * D);
        float on_key[4], on_query[4];
        for (int64_t i = 0; i < work.n; ++i) {
            if (work.parents != nullptr && work.parents[i] != i - 1) {
                const int64_t parent = work.parents[i];
                load(m, parent < 0 ? work.state + row * D : seen + parent * R * D);
            }
            const float * k = work.k + i * work.qk_row;
            const float * v = work.v + i * work.v_row + row;
            const float decay = work.decay[i * work.gate_row];
            const float beta = work.beta[i * work.gate_row];
            products(m, k, on_key);
            if (ANSWERS) {
                products(m, work.q + i * work.qk_row, on_query);
            }
            F change[R];
            for (int r = 0; r < R; ++r) {
                const float delta = (v[r] - decay * on_key[r]) * beta;
                change[r] = V::spread(delta);
                if (ANSWERS) {
                    work.out[i * work.out_row + row + r] = decay * on_query[r] + delta * work.qk[i];
                }
            }
            const F kept = V::spread(decay);
            for (int j = 0; j < N; ++j) {
                const F key = V::load(k + j * V::T);
                for (int r = 0; r < R; ++r) {
                    m[r][j] = V::mul_add(change[r], key, V::mul(kept, m[r][j]));
                }
            }
            if (work.parents != nullptr) {
                store(m, seen + i * R * D);
            }
        }
        if (work.last_state != nullptr) {
            store(m, work.last_state + row * D);
        }
    }

    static void walk(const DeltaWalk & work, float * seen) {
        for (int64_t row = 0; row < D; row += R) {
            if (work.q != nullptr) {
                walk_rows<true>(work, row, seen);
            } else {
                walk_rows<false>(work, row, seen);
            }
        }
    }
};

template <class V>
struct DeltaHeadTiles {
    using F = typename V::F;
    static constexpr int T = V::T;

    static bool serves(int64_t d) {
        return d <= MAX_DELTA_HEAD &&
               (d == T || d == 2 * T || d == 4 * T || d == 8 * T || d == 16 * T);
    }

    // x * sigmoid(x)
    static F silu(F x) {
        const F e = V::exp(V::where_negative(x, x, V::sub(V::zero(), x))); // exp(-|x|)
        const F one = V::spread(1.0f);
        return V::divide(V::mul(x, V::where_negative(x, e, one)), V::add(one, e));
    }

    static void convolve(const DeltaConvolution & work) {
        const int64_t d = work.d, before = work.d_conv - 1;
        float kernel[MAX_DELTA_TAPS * MAX_DELTA_HEAD]; // tap by tap
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
                F sum = V::mul(V::load(under[0] + c), V::load(kernel + c));
                for (int64_t t = 1; t < work.d_conv; ++t) {
                    sum = V::mul_add(V::load(under[t] + c), V::load(kernel + t * d + c), sum);
                }
                V::store(out + c, silu(sum));
            }
        }
    }

    static float dot(const float * a, const float * b, int64_t d) {
        F sum[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
        for (int64_t c = 0; c < d; c += T) {
            sum[0] = V::mul_add(V::load(a + c), V::load(b + c), sum[0]);
        }
        float total[4];
        V::sums(sum, total);
        return total[0];
    }

    static void scale(const float * x, int64_t d, float length, float eps, float * to) {
        const F by = V::spread(length / std::sqrt(dot(x, x, d) + eps));
        for (int64_t c = 0; c < d; c += T) {
            V::store(to + c, V::mul(by, V::load(x + c)));
        }
    }

    static void gate(const DeltaGate & work) {
        const auto d = static_cast<float>(work.d);
        const F by = V::spread(1.0f / std::sqrt(dot(work.out, work.out, work.d) / d + work.eps));
        for (int64_t c = 0; c < work.d; c += T) {
            const F normed = V::mul(V::mul(by, V::load(work.out + c)), V::load(work.weight + c));
            V::store(work.out + c, V::mul(normed, silu(V::load(work.gate + c))));
        }
    }

    static int64_t scratch_size(int64_t d, int64_t n) {
        constexpr int64_t most_rows = 4;
        return most_rows * d * n;
    }

    static void walk(const DeltaWalk & work, float * scratch) {
        switch (work.d / T) {
        case 1:
            return DeltaWalkTiles<V, 1>::walk(work, scratch);
        case 2:
            return DeltaWalkTiles<V, 2>::walk(work, scratch);
        case 4:
            return DeltaWalkTiles<V, 4>::walk(work, scratch);
        case 8:
            return DeltaWalkTiles<V, 8>::walk(work, scratch);
        default:
            return DeltaWalkTiles<V, 16>::walk(work, scratch);
        }
    }

    static constexpr DeltaHeadKernel KERNEL = {serves,       convolve, scale, dot,
                                               scratch_size, walk,     gate};
};

} // namespace
} // namespace dfl::cpu
