// Q6_K: 256 weights of 6 bits less 32, in sixteenths with a scale of 8 bits each. A tile is its
// blocks and then their scales, [n_in / 256][T]; a block is the scales of the sixteenths, [16][T],
// the nibbles as ggml pairs them, [32][T][4], and the upper bits, [16][T][4].
#pragma once

#include "tiles.h"

namespace dfl::cpu {
namespace {

template <class V>
struct Q6_K {
    using Vector = V;
    static constexpr ggml_type TYPE = GGML_TYPE_Q6_K;
    static constexpr int BLOCK = 256, T = V::T, MAX_ROWS = V::MAX_ROWS;
    static constexpr int ROW_BLOCK = 210, TILE_BLOCK = 208 * T;
    static constexpr int LOW_AT = 16 * T, HIGH_AT = 144 * T;

    static size_t tile_size(int64_t n_in) { return n_in / 256 * (ROW_BLOCK * T); }
    static int64_t scales_at(int64_t n_in) { return n_in / 256 * TILE_BLOCK; }

    static void pack_row(const uint8_t * row, int64_t n_in, int lane, uint8_t * tile) {
        uint8_t * scales = tile + scales_at(n_in) + 2 * lane;
        for (int64_t b = 0; b < n_in / 256; ++b, row += ROW_BLOCK, tile += TILE_BLOCK) {
            copy_fours(row, 4, tile + LOW_AT + 4 * lane, 4 * T, 32, 0);
            copy_fours(row + 128, 4, tile + HIGH_AT + 4 * lane, 4 * T, 16, 0);
            for (int i = 0; i < 16; ++i) {
                tile[i * T + lane] = row[192 + i];
            }
            std::memcpy(scales + b * 2 * T, row + 208, 2);
        }
    }

    static void unpack_row(const uint8_t * tile, int64_t n_in, int lane, uint8_t * row) {
        const uint8_t * scales = tile + scales_at(n_in) + 2 * lane;
        for (int64_t b = 0; b < n_in / 256; ++b, row += ROW_BLOCK, tile += TILE_BLOCK) {
            copy_fours(tile + LOW_AT + 4 * lane, 4 * T, row, 4, 32, 0);
            copy_fours(tile + HIGH_AT + 4 * lane, 4 * T, row + 128, 4, 16, 0);
            for (int i = 0; i < 16; ++i) {
                row[192 + i] = tile[i * T + lane];
            }
            std::memcpy(row + 208, scales + b * 2 * T, 2);
        }
    }

    static size_t quantized_row_size(int64_t n_in) { return n_in / 256 * sizeof(Block256); }
    static void quantize_row(const float * x, int64_t n_in, void * dst) {
        quantize_blocks_256(x, n_in, dst);
    }

    // 4 inputs of the sixteenth I, from 4 * k on. Of 128 inputs ggml pairs the first 64 nibbles
    // with the last 64, and the upper bits of all four 32.
    template <int I>
    static typename V::I weights(const uint8_t * block, int k) {
        constexpr int HALF = I / 8, QUARTER = I / 2 % 4, SIDE = I % 2;
        const int low = HALF * 16 + QUARTER % 2 * 8 + SIDE * 4 + k, high = HALF * 8 + SIDE * 4 + k;
        return V::both(
            V::template bits<QUARTER / 2 * 4>(V::load(block + LOW_AT + low * 4 * T), 15),
            V::template bits<QUARTER * 2 - 4>(V::load(block + HIGH_AT + high * 4 * T), 48));
    }

    // total[r] += what the sixteenth I adds, in units of the block's scale.
    template <int I, int R>
    static void add_sixteenth(typename V::F (&total)[R], const uint8_t * block, const Rows<R> & x) {
        prefetch<TILE_BLOCK / 16>(block + I * (TILE_BLOCK / 16), x);
        typename V::I sum[R];
        for (int r = 0; r < R; ++r) {
            sum[r] = V::spread(reinterpret_cast<const Block256 *>(x[r])->biases[I]);
        }
        V::template dot<4, 63>(sum, [&](int k) { return weights<I>(block, k); }, x, 16 * I);
        const auto scale = V::signed_bytes(block + I * T);
        for (int r = 0; r < R; ++r) {
            total[r] = V::mul_add(V::to_float(sum[r]), scale, total[r]);
        }
    }

    template <int R, int... I>
    static void add_sixteenths(typename V::F (&total)[R], const uint8_t * block, const Rows<R> & x,
                               std::integer_sequence<int, I...>) {
        (add_sixteenth<I>(total, block, x), ...);
    }

    template <int R>
    static void multiply(const uint8_t * tile, int64_t n_in, Rows<R> x, typename V::F (&acc)[R]) {
        const uint8_t * scales = tile + scales_at(n_in);
        for (int64_t b = 0; b < n_in / 256; ++b) {
            typename V::F total[R];
            for (int r = 0; r < R; ++r) {
                total[r] = V::zero();
            }
            add_sixteenths<R>(total, tile, x, std::make_integer_sequence<int, 16>());
            prefetch<2 * T>(scales, x);
            const auto d = V::halves(scales);
            for (int r = 0; r < R; ++r) {
                const auto d_x = V::spread(reinterpret_cast<const Block256 *>(x[r])->d);
                acc[r] = V::mul_add(total[r], V::mul(d, d_x), acc[r]);
            }
            tile += TILE_BLOCK;
            scales += 2 * T;
            x.advance(sizeof(Block256));
        }
    }
};

} // namespace
} // namespace dfl::cpu
