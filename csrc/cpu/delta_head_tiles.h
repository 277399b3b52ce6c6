// The loops of DeltaHeadKernel over vectors of V::T floats.
#pragma once

#include "delta_head.h"

#include <algorithm>
#include <cmath>

namespace dfl::cpu {
namespace {

// For heads of N vectors: rows of the state (the keys' weights in one value) do not touch each
// other, so a few of them walk the whole tree, in registers as far as these go. What happens to a
// row waits for what happened to it before, so of several nodes two groups of rows go side by side.
template <class V, int N, int G>
struct DeltaWalkTiles {
    using F = typename V::F;
    static constexpr int D = N * V::T;
    static constexpr int R = N <= 4 ? 4 : 2; // state rows of a group
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

    // Node i on the rows of a group, the first of which is `row`.
    template <bool ANSWERS>
    static void step(const DeltaWalk & work, int64_t i, int64_t row, Rows & m) {
        const float * k = work.k + i * work.qk_row;
        const float * v = work.v + i * work.v_row + row;
        const float decay = work.decay[i * work.gate_row];
        const float beta = work.beta[i * work.gate_row];
        float on_key[4], on_query[4];
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
    }

    // Rows [row, row + G * R) of the state. seen: room for as many of every node's.
    template <bool ANSWERS>
    static void walk_rows(const DeltaWalk & work, int64_t row, float * seen) {
        constexpr int64_t group = R * D;
        const float * state = work.state + row * D;
        Rows m[G];
        for (int g = 0; g < G; ++g) {
            load(m[g], state + g * group);
        }
        for (int64_t i = 0; i < work.n; ++i) {
            if (work.parents != nullptr && work.parents[i] != i - 1) {
                const int64_t parent = work.parents[i];
                for (int g = 0; g < G; ++g) {
                    load(m[g], (parent < 0 ? state : seen + parent * G * group) + g * group);
                }
            }
            for (int g = 0; g < G; ++g) {
                step<ANSWERS>(work, i, row + g * R, m[g]);
            }
            for (int g = 0; g < G && work.parents != nullptr; ++g) {
                store(m[g], seen + (i * G + g) * group);
            }
        }
        for (int g = 0; g < G && work.last_state != nullptr; ++g) {
            store(m[g], work.last_state + row * D + g * group);
        }
    }

    static void walk(const DeltaWalk & work, float * seen) {
        for (int64_t row = 0; row < D; row += G * R) {
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
        constexpr int64_t most_rows = 8;
        return most_rows * d * n;
    }

    template <int N>
    static void walk_heads(const DeltaWalk & work, float * scratch) {
        if (work.n == 1) {
            DeltaWalkTiles<V, N, 1>::walk(work, scratch);
        } else {
            DeltaWalkTiles<V, N, 2>::walk(work, scratch);
        }
    }

    static void walk(const DeltaWalk & work, float * scratch) {
        switch (work.d / T) {
        case 1:
            return walk_heads<1>(work, scratch);
        case 2:
            return walk_heads<2>(work, scratch);
        case 4:
            return walk_heads<4>(work, scratch);
        case 8:
            return walk_heads<8>(work, scratch);
        default:
            return walk_heads<16>(work, scratch);
        }
    }

    static constexpr DeltaHeadKernel KERNEL = {serves,       convolve, scale, dot,
                                               scratch_size, walk,     gate};
};

} // namespace
} // namespace dfl::cpu
