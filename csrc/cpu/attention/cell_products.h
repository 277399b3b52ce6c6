// Products of attention: scores of queries with a block's keys, and weighted sums of its values.
// Vector lanes are cells for scores and values of a head for sums: a score does not depend on its
// cell's place in a tile, and no sum of values crosses lanes.
#pragma once

#include "cpu/attention/cell_attention.h"
#include "cpu/attention/cell_values.h"

#include <algorithm>

namespace dfl::cpu {
namespace {

// Prefetches cache lines of keys or values into L2, a few at each step of other work: a burst would
// stall the core, and L2 has more fetches in flight than L1. The hardware does not predict these
// lines, because the rows of a head lie apart, and the weights of a pass have evicted all lines
// from the caches.
struct Fetch {
    static constexpr int LINE = 64;
    const char * const * cells; // addresses of a head's values in each cell
    int64_t cell, end;
    int64_t bytes; // bytes of a head in one cell
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
    static constexpr int QUERIES = 6; // largest number of queries whose sums fit in registers
    static_assert(BLOCK % (V::WIDE * T) == 0);

    template <int N = QUERIES, class Body>
    static void with_count(int64_t n, Body && body) {
        if (n == N) {
            body(std::integral_constant<int, N>());
        } else if constexpr (N > 1) {
            with_count<N - 1>(n, body);
        }
    }

    // Runs body(i) for i in [first, end) and prefetches on the way: with 16-bit values, the
    // products of one block prefetch all of the next block.
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

    // Computes scores of n queries with keys [first, end), rounded out to whole vectors.
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

    // Adds weighted values of cells [first, end) to W vectors of the sums of N queries.
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
