// Delta rule scan of many nodes, on a transposed state: a vector holds one key's weights for T
// values. Sums need no slow additions across lanes. They are added in the order of DeltaScanRows,
// so that both scans give the same bits.
#pragma once

#include "cpu/delta_net/delta_head.h"

#include <algorithm>

namespace dfl::cpu {
namespace {

template <class V, int N>
struct DeltaScanLanes {
    using F = typename V::F;
    static constexpr int T = V::T;
    static constexpr int D = N * T;
    static constexpr int SLICE = D * T;         // floats in a slice, T rows of the state
    static constexpr int SUMS = N <= 4 ? 1 : 2; // number of partial sums of a state row
    static constexpr int HALF = T / 2;

    // A node's update of its parent's state: weights <- decay * weights + delta * k.
    struct Change {
        F decay, delta;
        const float * k;
    };

    static Change none() { return {V::zero(), V::zero(), nullptr}; }

    struct Products {
        F key, query;
    };

    static void load(const float * state, float * slice) {
        for (int c = 0; c < D; c += T) {
            F r[T];
            for (int j = 0; j < T; ++j) {
                r[j] = V::load(state + j * D + c);
            }
            V::transpose(r);
            for (int j = 0; j < T; ++j) {
                V::store(slice + (c + j) * T, r[j]);
            }
        }
    }

    static void store(const float * slice, float * state) {
        for (int c = 0; c < D; c += T) {
            F r[T];
            for (int j = 0; j < T; ++j) {
                r[j] = V::load(slice + (c + j) * T);
            }
            V::transpose(r);
            for (int j = 0; j < T; ++j) {
                V::store(state + j * D + c, r[j]);
            }
        }
    }

    static F changed(const Change & change, const float * slice, int i) {
        return V::mul_add(change.delta, V::spread(change.k[i]),
                          V::mul(change.decay, V::load(slice + i * T)));
    }

    // Multiplies a slice of the state with k and q for half of the T keys of each vector, and adds
    // the products in the order in which V::sums() adds a vector's lanes.
    template <bool CHANGES, bool ANSWERS>
    static Products half_products(float * slice, const Change & change, const float * k,
                                  const float * q, int sum, int half) {
        F key[HALF], query[HALF];
        std::fill(key, key + HALF, V::zero());
        std::fill(query, query + HALF, V::zero());
        for (int c = sum; c < N; c += SUMS) {
#pragma GCC unroll 8
            for (int m = 0; m < HALF; ++m) {
                const int i = c * T + V::lane_of_half(half, m);
                F weights;
                if (CHANGES) {
                    weights = changed(change, slice, i);
                    V::store(slice + i * T, weights);
                } else {
                    weights = V::load(slice + i * T);
                }
                key[m] = V::mul_add(weights, V::spread(k[i]), key[m]);
                if (ANSWERS) {
                    query[m] = V::mul_add(weights, V::spread(q[i]), query[m]);
                }
            }
        }
        return {V::sum_of_half(key), V::sum_of_half(query)};
    }

    // Multiplies a slice of the state with k and q. CHANGES: applies the last node's `change`
    // first.
    template <bool CHANGES, bool ANSWERS>
    static Products products(float * slice, const Change & change, const float * k,
                             const float * q) {
        Products total = {V::zero(), V::zero()};
        for (int sum = 0; sum < SUMS; ++sum) {
            const auto low = half_products<CHANGES, ANSWERS>(slice, change, k, q, sum, 0);
            const auto high = half_products<CHANGES, ANSWERS>(slice, change, k, q, sum, 1);
            const Products both = {V::add(low.key, high.key), V::add(low.query, high.query)};
            total = sum == 0
                        ? both
                        : Products{V::add(total.key, both.key), V::add(total.query, both.query)};
        }
        return total;
    }

    static void apply(const Change & change, const float * from, float * to) {
        for (int i = 0; i < D; ++i) {
            V::store(to + i * T, changed(change, from, i));
        }
    }

    // Returns node i's update of T state rows (values), from `value` on, and writes their outputs
    // if ANSWERS. `on`: products of the parent's state with k and q.
    template <bool ANSWERS>
    static Change node(const DeltaScan & work, int64_t i, int64_t value, const Products & on) {
        const F decay = V::spread(work.decay[i * work.gate_row]);
        const F beta = V::spread(work.beta[i * work.gate_row]);
        const F v = V::load(work.v + i * work.v_row + value);
        const F delta = V::mul(V::sub(v, V::mul(decay, on.key)), beta);
        if (ANSWERS) {
            const F own = V::mul(delta, V::spread(work.qk[i]));
            V::store(work.out + i * work.out_row + value, V::add(V::mul(decay, on.query), own));
        }
        return {decay, delta, work.k + i * work.qk_row};
    }

    static const float * query(const DeltaScan & work, int64_t i) {
        return work.q != nullptr ? work.q + i * work.qk_row : nullptr;
    }

    // Applies each node's update of the state while reading the state for the next node, which
    // saves a pass over memory.
    template <bool ANSWERS>
    static void scan_chain(const DeltaScan & work, int64_t value, float * slice) {
        Change change = none();
        for (int64_t i = 0; i < work.n; ++i) {
            const float *k = work.k + i * work.qk_row, *q = query(work, i);
            const Products on = i == 0 ? products<false, ANSWERS>(slice, change, k, q)
                                       : products<true, ANSWERS>(slice, change, k, q);
            change = node<ANSWERS>(work, i, value, on);
        }
        if (work.last_state != nullptr) {
            apply(change, slice, slice);
            store(slice, work.last_state + value * D);
        }
    }

    template <bool ANSWERS>
    static void scan_tree(const DeltaScan & work, int64_t value, float * slice, float * states) {
        for (int64_t i = 0; i < work.n; ++i) {
            float * from = work.parents[i] < 0 ? slice : states + work.parents[i] * SLICE;
            const Products on =
                products<false, ANSWERS>(from, none(), work.k + i * work.qk_row, query(work, i));
            apply(node<ANSWERS>(work, i, value, on), from, states + i * SLICE);
        }
        if (work.last_state != nullptr) {
            store(states + (work.n - 1) * SLICE, work.last_state + value * D);
        }
    }

    static void scan(const DeltaScan & work, float * states) {
        alignas(64) float slice[SLICE];
        for (int64_t value = 0; value < D; value += T) {
            load(work.state + value * D, slice);
            for (int64_t i = 0; i < SLICE && value + T < D; i += 16) {
                __builtin_prefetch(work.state + (value + T) * D + i);
            }
            if (work.parents != nullptr) {
                work.q != nullptr ? scan_tree<true>(work, value, slice, states)
                                  : scan_tree<false>(work, value, slice, states);
            } else {
                work.q != nullptr ? scan_chain<true>(work, value, slice)
                                  : scan_chain<false>(work, value, slice);
            }
        }
    }
};

} // namespace
} // namespace dfl::cpu
