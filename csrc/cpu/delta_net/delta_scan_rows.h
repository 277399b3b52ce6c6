// Delta rule scan of few nodes. Rows of the state (one value's weights of all keys) are
// independent, so R rows at a time scan the whole tree in registers.
#pragma once

#include "cpu/delta_net/delta_head.h"

#include <algorithm>

namespace dfl::cpu {
namespace {

template <class V, int N>
struct DeltaScanRows {
    using F = typename V::F;
    static constexpr int D = N * V::T;
    static constexpr int R = N <= 4 ? 4 : 2;
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

    static void products(const Rows & m, const float * x, float * to) {
        static_assert(R == 2 || R == 4);
        F sum[4];
        std::fill(sum, sum + 4, V::zero());
        for (int i = 0; i < N; ++i) {
            const F value = V::load(x + i * V::T);
            // If R is 2, a row has two partial sums, as each addition waits for the one before.
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

    // Scans state rows [row, row + R). states: room for R rows of each node.
    template <bool ANSWERS>
    static void scan_rows(const DeltaScan & work, int64_t row, float * states) {
        Rows m;
        load(m, work.state + row * D);
        float on_key[4], on_query[4];
        for (int64_t i = 0; i < work.n; ++i) {
            if (work.parents != nullptr && work.parents[i] != i - 1) {
                const int64_t parent = work.parents[i];
                load(m, parent < 0 ? work.state + row * D : states + parent * R * D);
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
            const F decayed = V::spread(decay);
            for (int j = 0; j < N; ++j) {
                const F key = V::load(k + j * V::T);
                for (int r = 0; r < R; ++r) {
                    m[r][j] = V::mul_add(change[r], key, V::mul(decayed, m[r][j]));
                }
            }
            if (work.parents != nullptr) {
                store(m, states + i * R * D);
            }
        }
        if (work.last_state != nullptr) {
            store(m, work.last_state + row * D);
        }
    }

    static void scan(const DeltaScan & work, float * states) {
        for (int64_t row = 0; row < D; row += R) {
            if (work.q != nullptr) {
                scan_rows<true>(work, row, states);
            } else {
                scan_rows<false>(work, row, states);
            }
        }
    }
};

} // namespace
} // namespace dfl::cpu
