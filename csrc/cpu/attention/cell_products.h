// The products of attention: scores of some queries with a block of keys, and the sums of a block's
// values that they weigh. Lanes are cells for the scores and values of a head for the sums, so a
// score does not depend on where its cell lies in a tile, and no sum of values crosses lanes.
#pragma once

#include "cpu/attention/cell_attention.h"
#include "cpu/attention/cell_values.h"

#include <algorithm>

namespace dfl::cpu {
namespace {

// Lines that are asked for while other work goes on, a few at each of its steps: a burst of them
// would stop the core until the first came. Into the second cache, as far more fetches stay in
// flight there than into the first. A core does not foresee them, as heads lie beside each other in
// a cell, and the weights of a pass drive them out of all caches.
struct Fetch {
    static constexpr int LINE = 64;
    const char * const * cells; // where values of a head begin
    int64_t cell, end;
    int64_t bytes; // of a head
    int64_t at = 0;

    void lines(int64_t n) {
        for (; n > 0 && cell < end; --n) {
            __builtin_prefetch(cells[cell] + at, 0, 2);
            at += LINE;
            if (at >= bytes) {
                at = 0;
                ++cell;
            }
        }
    }
    void rest() { lines(INT64_MAX); }
};

template <class V>
struct CellProducts {
    using F = typename V::F;
    static constexpr int T = V::T;
    static constexpr int BLOCK = CELL_BLOCK;
    static constexpr int QUERIES = 6; // in registers, with V::WIDE vectors of cells or values
    static_assert(BLOCK % (V::WIDE * T) == 0);

    template <int N = QUERIES, class Body>
    static void with_count(int64_t n, Body && body) {
        if (n == N) {
            body(std::integral_constant<int, N>());
        } else if constexpr (N > 1) {
            with_count<N - 1>(n, body);
        }
    }

    // A loop over i in [first, end) of products, which asks for lines on its way: for all of a
    // block's by the time that those of a block have been made, where values take 16 bits.
    template <class Body>
    static void loop(int64_t first, int64_t end, Fetch & fetch, Body && body) {
        constexpr int64_t step = 8, lines = step * V::WIDE * T / 32;
        for (int64_t i = first; i < end;) {
            fetch.lines(lines);
            for (const int64_t stop = std::min(i + step, end); i < stop; ++i) {
                body(i);
            }
        }
    }

    // Scores of N queries with W vectors of keys.
    template <int N, int W, class Key>
    static void score(const float * q, int64_t d, const Key * keys, float * scores, int64_t stride,
                      Fetch & fetch) {
        F sum[N][W];
#pragma GCC unroll 8
        for (int r = 0; r < N; ++r) {
#pragma GCC unroll 8
            for (int i = 0; i < W; ++i) {
                sum[r][i] = V::zero();
            }
        }
        loop(0, d, fetch, [&](int64_t j) {
            F key[W];
#pragma GCC unroll 8
            for (int i = 0; i < W; ++i) {
                key[i] = CellValues<V>::read(keys + j * BLOCK + i * T);
            }
#pragma GCC unroll 8
            for (int r = 0; r < N; ++r) {
                const F value = V::spread(q[r * d + j]);
#pragma GCC unroll 8
                for (int i = 0; i < W; ++i) {
                    sum[r][i] = V::mul_add(value, key[i], sum[r][i]);
                }
            }
        });
#pragma GCC unroll 8
        for (int r = 0; r < N; ++r) {
#pragma GCC unroll 8
            for (int i = 0; i < W; ++i) {
                V::store(scores + r * stride + i * T, sum[r][i]);
            }
        }
    }

    // Scores of n queries with keys [first, end) of a tile, and others beside them.
    template <class Key>
    static void score_all(int64_t n, const float * q, int64_t d, const Key * keys, int64_t first,
                          int64_t end, float * scores, int64_t stride, Fetch & fetch) {
        with_count(n, [&](auto count) {
            constexpr int N = decltype(count)::value;
            int64_t c = first / T * T;
            for (; c + (V::WIDE - 1) * T < end; c += V::WIDE * T) {
                score<N, V::WIDE>(q, d, keys + c, scores + c, stride, fetch);
            }
            for (; c < end; c += T) {
                score<N, 1>(q, d, keys + c, scores + c, stride, fetch);
            }
        });
    }

    // Adds the weighted values of cells [first, end) to the sums of N queries, W vectors of them.
    template <int N, int W, class Value>
    static void add_values(const float * weights, int64_t stride, const char * const * rows,
                           int64_t first, int64_t end, int64_t j, float * sums, int64_t width,
                           Fetch & fetch) {
        F sum[N][W];
#pragma GCC unroll 8
        for (int r = 0; r < N; ++r) {
#pragma GCC unroll 8
            for (int i = 0; i < W; ++i) {
                sum[r][i] = V::load(sums + r * width + j + i * T);
            }
        }
        loop(first, end, fetch, [&](int64_t c) {
            const Value * row = reinterpret_cast<const Value *>(rows[c]) + j;
            F value[W];
#pragma GCC unroll 8
            for (int i = 0; i < W; ++i) {
                value[i] = CellValues<V>::read(row + i * T);
            }
#pragma GCC unroll 8
            for (int r = 0; r < N; ++r) {
                const F weight = V::spread(weights[r * stride + c]);
#pragma GCC unroll 8
                for (int i = 0; i < W; ++i) {
                    sum[r][i] = V::mul_add(weight, value[i], sum[r][i]);
                }
            }
        });
#pragma GCC unroll 8
        for (int r = 0; r < N; ++r) {
#pragma GCC unroll 8
            for (int i = 0; i < W; ++i) {
                V::store(sums + r * width + j + i * T, sum[r][i]);
            }
        }
    }

    template <class Value>
    static void add_all(int64_t n, const float * weights, int64_t stride, const char * const * rows,
                        int64_t first, int64_t end, float * sums, int64_t width, Fetch & fetch) {
        if (first >= end) {
            return;
        }
        with_count(n, [&](auto count) {
            constexpr int N = decltype(count)::value;
            int64_t j = 0;
            for (; j + V::WIDE * T <= width; j += V::WIDE * T) {
                add_values<N, V::WIDE, Value>(weights, stride, rows, first, end, j, sums, width,
                                              fetch);
            }
            for (; j < width; j += T) {
                add_values<N, 1, Value>(weights, stride, rows, first, end, j, sums, width, fetch);
            }
        });
    }
};

} // namespace
} // namespace dfl::cpu
