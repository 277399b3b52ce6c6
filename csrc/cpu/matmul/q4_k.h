// Q4_K and Q5_K: 256 weights of 4 or 5 bits in eighths with a scale and a minimum of 6 bits each.
// A block of a tile is Scales6, the nibbles as ggml pairs them, [32][T][4], with Q5_K's fifth bits,
// [8][T][4], before each of the first eight, the scales [T] and the scales of the minima [T].
#pragma once

#include "cpu/matmul/scales_6.h"

namespace dfl::cpu {
namespace {

template <class V, bool FIVE>
struct Q45K {
    using Vector = V;
    static constexpr ggml_type TYPE = FIVE ? GGML_TYPE_Q5_K : GGML_TYPE_Q4_K;
    static constexpr int BLOCK = 256, T = V::T, MAX_ROWS = V::MAX_ROWS;
    static constexpr int UNFETCHED_ROWS = 2;
    static constexpr int HIGH = FIVE ? 8 : 0, FOURS = HIGH + 32;
    static constexpr int ROW_BLOCK = 16 + 4 * FOURS, TILE_BLOCK = ROW_BLOCK * T;
    static constexpr int FOURS_AT = 12 * T, HALVES_AT = FOURS_AT + 4 * FOURS * T;
    using Scales = Scales6<V>;

    // Where the fours of a row's block lie in a tile's: the upper bits, then the nibbles.
    static constexpr int four_at(int i) {
        const bool is_paired = i < 2 * HIGH;
        return FOURS_AT + 4 * T * (is_paired ? i % 8 * 2 + i / 8 : i);
    }

    // copy(first, stride, n) for fours of a row that are as far apart in a tile. One loop over
    // four_at(i) would do, but GCC 12 makes wrong code of it at -O3.
    template <class Copy>
    static void for_fours(Copy && copy) {
        if constexpr (FIVE) {
            copy(0, 8 * T, HIGH);
            copy(HIGH, 8 * T, HIGH);
        }
        copy(2 * HIGH, 4 * T, FOURS - 2 * HIGH);
    }

    static size_t tile_size(int64_t n_in) { return n_in / 256 * TILE_BLOCK; }

    static void pack_row(const uint8_t * row, int64_t n_in, int lane, uint8_t * tile) {
        for (int64_t b = 0; b < n_in / 256; ++b, row += ROW_BLOCK, tile += TILE_BLOCK) {
            std::memcpy(tile + HALVES_AT + 2 * lane, row, 2);
            std::memcpy(tile + HALVES_AT + 2 * T + 2 * lane, row + 2, 2);
            Scales::pack(row + 4, lane, tile);
            for_fours([&](int first, int stride, int n) {
                copy_fours(row + 16 + 4 * first, 4, tile + four_at(first) + 4 * lane, stride, n, 0);
            });
        }
    }

    static size_t quantized_row_size(int64_t n_in) { return n_in / 256 * sizeof(Block256); }
    static void quantize_row(const float * x, int64_t n_in, void * dst) {
        quantize_blocks_256(x, n_in, dst);
    }

    // 4 inputs of the eighth I, from 4 * k on.
    template <int I>
    static typename V::I weights(const uint8_t * block, int k) {
        const auto pair = V::load(block + four_at(HIGH + I / 2 * 8 + k));
        const auto nibbles = V::template bits<I % 2 * 4>(pair, 15);
        if constexpr (FIVE) {
            return V::both(nibbles, V::template bits<I - 4>(V::load(block + four_at(k)), 16));
        }
        return nibbles;
    }

    // total[r] += what the eighth I adds, in units of d.
    template <int I, int R>
    static void add_eighth(typename V::F (&total)[R], const uint8_t * block, const uint8_t * scales,
                           const Rows<R> & x) {
        prefetch<TILE_BLOCK / 8>(block + I * (TILE_BLOCK / 8), x);
        typename V::I sum[R];
        for (int r = 0; r < R; ++r) {
            sum[r] = V::spread(0);
        }
        V::template dot<8, FIVE ? 31 : 15>(
            sum, [&](int k) { return weights<I>(block, k); }, x, 32 * I);
        const auto scale = V::unsigned_bytes(scales + I * T);
        for (int r = 0; r < R; ++r) {
            total[r] = V::mul_add(V::to_float(sum[r]), scale, total[r]);
        }
    }

    template <int R, int... I>
    static void add_eighths(typename V::F (&total)[R], const uint8_t * block,
                            const uint8_t * scales, const Rows<R> & x,
                            std::integer_sequence<int, I...>) {
        (add_eighth<I>(total, block, scales, x), ...);
    }

    template <int R>
    static void multiply(const uint8_t * tile, int64_t n_in, Rows<R> x, typename V::F (&acc)[R]) {
        for (int64_t b = 0; b < n_in / 256; ++b) {
            uint8_t scales[16 * T];
            Scales::to_bytes(tile, scales);
            typename V::F total[R];
            for (int r = 0; r < R; ++r) {
                total[r] = V::zero();
            }
            add_eighths<R>(total, tile, scales, x, std::make_integer_sequence<int, 8>());
            const auto d = V::halves(tile + HALVES_AT);
            const auto d_min = V::halves(tile + HALVES_AT + 2 * T);
            for (int r = 0; r < R; ++r) {
                const auto * block = reinterpret_cast<const Block256 *>(x[r]);
                auto minima = V::spread(0);
                for (int p = 0; p < 4; ++p) {
                    const auto pair = V::pairs(scales + 8 * T + p * 2 * T);
                    minima = V::dot_pairs(minima, pair, block->sums + 2 * p);
                }
                const auto d_x = V::spread(block->d);
                acc[r] = V::mul_add(total[r], V::mul(d, d_x), acc[r]);
                acc[r] = V::mul_sub(V::to_float(minima), V::mul(d_min, d_x), acc[r]);
            }
            tile += TILE_BLOCK;
            x.advance(sizeof(Block256));
        }
    }
};

template <class V>
using Q4_K = Q45K<V, false>;
template <class V>
using Q5_K = Q45K<V, true>;

} // namespace
} // namespace dfl::cpu
