// PackedProduct of float weights, read in place: rows as ggml stores them, at any address. Each
// lane is summed over the whole row and lanes are added in one order, so that an output's bits do
// not depend on the rows and outputs computed beside it.
#pragma once

#include "cpu/matmul/rows_in_place.h"

#include <algorithm>
#include <cstring>

namespace dfl::cpu {
namespace {

template <class V, ggml_type OF>
struct FloatWeights {
    using F = typename V::F;
    static constexpr ggml_type TYPE = OF;
    static constexpr int LANES = V::T, MAX_ROWS = V::PRODUCT_ROWS;
    static constexpr int X_SIZE = sizeof(float), SIZE = OF == GGML_TYPE_F32 ? 4 : 2;
    using Weights = F;
    using Inputs = F;

    static F zero() { return V::zero(); }
    static Weights weights(const uint8_t * p) {
        if constexpr (OF == GGML_TYPE_F32) {
            return V::load(reinterpret_cast<const float *>(p));
        } else if constexpr (OF == GGML_TYPE_F16) {
            return V::halves(reinterpret_cast<const uint16_t *>(p));
        } else {
            return V::brains(reinterpret_cast<const uint16_t *>(p));
        }
    }
    static Inputs inputs(const uint8_t * p) { return V::load(reinterpret_cast<const float *>(p)); }
    static F mul_add(Inputs x, Weights w, F sum) { return V::mul_add(x, w, sum); }
    static void sums(const F (&x)[4], float * to) { V::sums(x, to); }
    static void take(const float * x, int64_t n, void * to) { std::memcpy(to, x, n * X_SIZE); }
};

template <class W>
struct FloatProduct : RowsInPlace<W::TYPE, 1> {
    using F = typename W::F;
    using RowsInPlace<W::TYPE, 1>::TILE;
    static constexpr int COLUMNS = 4, LANES = W::LANES;
#if defined(DFL_FEW_ROWS)
    static constexpr int MAX_ROWS = 2;
#else
    static constexpr int MAX_ROWS = W::MAX_ROWS;
#endif
    // Bytes of x (rows of inputs) that stay in the shared L3 cache while blocks of weights pass.
    static constexpr int64_t CHUNK = 4 * 1024 * 1024;
    // Bytes of weights that stay in a core's L2 cache while the rows of x pass.
    static constexpr int64_t WEIGHTS_CHUNK = 192 * 1024;

    static size_t quantized_row_size(int64_t n_in) { return n_in * W::X_SIZE; }
    static void quantize_row(const float * x, int64_t n_in, void * dst) { W::take(x, n_in, dst); }

    template <class Load>
    static auto padded(Load load, const uint8_t * p, int64_t n, int size) {
        uint8_t bytes[LANES * sizeof(float)] = {};
        std::memcpy(bytes, p, n * size);
        return load(bytes);
    }

    // True if the weight rows multiplied together lie far apart, each in a stream that the hardware
    // prefetches. Faster for up to 2 rows of x, which memory limits; arithmetic limits more rows.
    template <int R>
    static constexpr bool STREAMS = R <= 2;

    // Multiplies N weight rows, `stride` bytes apart, with R rows of x.
    template <int R, int N>
    static void add_up(const uint8_t * w, int64_t stride, int64_t n_in, const uint8_t * x,
                       F (&sum)[R][COLUMNS]) {
        // Prefetches weights that follow the N rows, at least min_ahead bytes ahead: the hardware
        // prefetcher stops at the end of rows that are read side by side.
        constexpr int64_t min_ahead = 8192;
        const int64_t size = n_in * W::SIZE, x_size = n_in * W::X_SIZE;
        const uint8_t * next = w + (min_ahead + N * size - 1) / (N * size) * (N * size);
        for (auto & row : sum) {
            std::fill(row, row + COLUMNS, W::zero());
        }
        typename W::Inputs in[R];
        const auto add = [&](auto weights) {
#pragma GCC unroll 4
            for (int c = 0; c < N; ++c) {
                const auto column = weights(w + c * stride);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    sum[r][c] = W::mul_add(in[r], column, sum[r][c]);
                }
            }
        };
        int64_t k = 0;
        for (; k + LANES <= n_in; k += LANES) {
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                in[r] = W::inputs(x + r * x_size + k * W::X_SIZE);
            }
            if constexpr (!STREAMS<R>) {
#pragma GCC unroll 4
                for (int i = 0; i < N * LANES * W::SIZE; i += 64) {
                    __builtin_prefetch(next + N * k * W::SIZE + i, 0, 2);
                }
            }
            add([&](const uint8_t * column) { return W::weights(column + k * W::SIZE); });
        }
        if (k < n_in) {
            for (int r = 0; r < R; ++r) {
                in[r] = padded(W::inputs, x + r * x_size + k * W::X_SIZE, n_in - k, W::X_SIZE);
            }
            add([&](const uint8_t * column) {
                return padded(W::weights, column + k * W::SIZE, n_in - k, W::SIZE);
            });
        }
    }

    // Computes N outputs, `stride` apart, of R rows of x.
    template <int R, int N>
    static void multiply_columns(const uint8_t * w, int64_t n_in, int64_t stride, const uint8_t * x,
                                 float * dst, int64_t dst_stride) {
        F sum[R][COLUMNS];
        add_up<R, N>(w, stride * n_in * W::SIZE, n_in, x, sum);
        for (int r = 0; r < R; ++r) {
            float sums[COLUMNS];
            W::sums(sum[r], sums);
            for (int c = 0; c < N; ++c) {
                dst[r * dst_stride + c * stride] = sums[c];
            }
        }
    }

    template <int R>
    static void multiply_group(const uint8_t * weights, int64_t n_in, int64_t first, int64_t last,
                               const uint8_t * x, float * dst, int64_t dst_stride) {
        const int64_t size = n_in * W::SIZE, n = (last - first) / COLUMNS;
        const int64_t stride = STREAMS<R> ? n : 1, step = STREAMS<R> ? 1 : COLUMNS;
        for (int64_t o = first; o < first + n * step; o += step) {
            multiply_columns<R, COLUMNS>(weights + o * size, n_in, stride, x, dst + o, dst_stride);
        }
        for (int64_t o = first + n * COLUMNS; o < last; ++o) {
            multiply_columns<R, 1>(weights + o * size, n_in, 1, x, dst + o, dst_stride);
        }
    }

    using MultiplyGroup = void (*)(const uint8_t *, int64_t, int64_t, int64_t, const uint8_t *,
                                   float *, int64_t);

    template <int... I>
    static MultiplyGroup multiply_group_of(int64_t n_rows, std::integer_sequence<int, I...>) {
        static constexpr MultiplyGroup OF[] = {multiply_group<I + 1>...};
        return OF[n_rows - 1];
    }

    static void multiply(const void * packed, int64_t n_in, int64_t n_out, const void * x,
                         int64_t n_rows, int64_t first_tile, int64_t last_tile, float * dst,
                         int64_t dst_stride) {
        const int64_t x_size = n_in * W::X_SIZE, max_rows = MAX_ROWS;
        const int64_t chunk = std::max<int64_t>(CHUNK / x_size / max_rows, 1) * max_rows;
        const int64_t last_out = std::min(last_tile * TILE, n_out);
        // If x has a single group of rows, all weights are one block, read once as long streams.
        const int64_t block = std::max<int64_t>(WEIGHTS_CHUNK / (n_in * W::SIZE) / TILE, 1) * TILE;
        const int64_t step = n_rows <= max_rows ? std::max<int64_t>(last_out, 1) : block;
        for (int64_t first = 0; first < n_rows; first += chunk) {
            const int64_t n = std::min(chunk, n_rows - first),
                          n_groups = (n + max_rows - 1) / max_rows;
            const auto * rows = static_cast<const uint8_t *>(x) + first * x_size;
            for (int64_t o = first_tile * TILE; o < last_out; o += step) {
                int64_t row = 0;
                for (int64_t group = 0; group < n_groups; ++group) {
                    const int64_t end = n * (group + 1) / n_groups;
                    multiply_group_of(end - row, std::make_integer_sequence<int, MAX_ROWS>())(
                        static_cast<const uint8_t *>(packed), n_in, o, std::min(o + step, last_out),
                        rows + row * x_size, dst + (first + row) * dst_stride, dst_stride);
                    row = end;
                }
            }
        }
    }
};

} // namespace
} // namespace dfl::cpu
