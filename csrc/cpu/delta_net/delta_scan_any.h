// Delta rule scan for heads of any size, R rows of the state at a time.
#pragma once

#include "cpu/delta_net/delta_head.h"
#include "cpu/simd/parts_of_rows.h"

#include <algorithm>

namespace dfl::cpu {
namespace {

template <class V>
struct DeltaScanAny {
    using F = typename V::F;
    using Part = PartsOfRows<V>;
    static constexpr int T = V::T;
    static constexpr int R = 4;

    static void products(const float * rows, const float * x, int64_t d, float (&to)[R]) {
        F sum[R] = {V::zero(), V::zero(), V::zero(), V::zero()};
        for (int64_t j = 0; j < d; j += T) {
            const F value = Part::load(x, j, d);
            for (int r = 0; r < R; ++r) {
                sum[r] = V::mul_add(Part::load(rows + r * d, j, d), value, sum[r]);
            }
        }
        V::sums(sum, to);
    }

    // Scans state rows [row, row + n). m: room for R state rows; states: R rows of each tree node.
    static void scan_rows(const DeltaScan & work, int64_t row, int64_t n, float * m,
                          float * states) {
        const int64_t d = work.d;
        const float * state = work.state + row * d;
        std::copy(state, state + n * d, m);
        for (int64_t i = 0; i < work.n; ++i) {
            if (work.parents != nullptr && work.parents[i] != i - 1) {
                const int64_t parent = work.parents[i];
                const float * from = parent < 0 ? state : states + parent * R * d;
                std::copy(from, from + n * d, m);
            }
            const float * k = work.k + i * work.qk_row;
            const float decay = work.decay[i * work.gate_row];
            const float beta = work.beta[i * work.gate_row];
            float on_key[R], on_query[R];
            products(m, k, d, on_key);
            if (work.q != nullptr) {
                products(m, work.q + i * work.qk_row, d, on_query);
            }
            for (int64_t r = 0; r < n; ++r) {
                const float v = work.v[i * work.v_row + row + r];
                const float delta = (v - decay * on_key[r]) * beta;
                if (work.q != nullptr) {
                    work.out[i * work.out_row + row + r] = decay * on_query[r] + delta * work.qk[i];
                }
                for (int64_t j = 0; j < d; j += T) {
                    const F decayed = V::mul(V::spread(decay), Part::load(m + r * d, j, d));
                    const F key = Part::load(k, j, d);
                    Part::store(m + r * d, j, d, V::mul_add(V::spread(delta), key, decayed));
                }
            }
            if (work.parents != nullptr) {
                std::copy(m, m + n * d, states + i * R * d);
            }
        }
        if (work.last_state != nullptr) {
            std::copy(m, m + n * d, work.last_state + row * d);
        }
    }

    static void scan(const DeltaScan & work, float * states) {
        float m[R * MAX_DELTA_HEAD] = {};
        for (int64_t row = 0; row < work.d; row += R) {
            scan_rows(work, row, std::min<int64_t>(R, work.d - row), m, states);
        }
    }
};

} // namespace
} // namespace dfl::cpu
