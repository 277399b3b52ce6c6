// Q6_K: 256 weights of 6 bits less 32, in sixteenths with a scale of 8 bits each. A block of a tile
// is the scales of the sixteenths, [16][T], the nibbles as ggml pairs them, [32][T][4], among which
// the upper bits, [16][T][4], lie in the order in which they are needed, and the scales [T], padded
// to whole vectors. One stream: the hardware's own fetches do not follow two.
#pragma once

#include "cpu/matmul/tiles.h"

namespace dfl::cpu {
namespace {

template <class V>
struct Q6_K {
    using Vector = V;
    static constexpr ggml_type TYPE = GGML_TYPE_Q6_K;
    static constexpr int BLOCK = 256, T = V::T, MAX_ROWS = V::MAX_ROWS;
    static constexpr int ROW_BLOCK = 210, TILE_BLOCK = 212 * T;
    static constexpr int D_AT = 208 * T;
    static constexpr int UNFETCHED_ROWS = 2;

    // Where the fours i of the nibbles and of the upper bits lie in a block: in each half 8 pairs
    // of both, then the other 8 of the nibbles.
    static constexpr int low_at(int i) {
        return four_at(i / 16, i % 16 < 8 ? 2 * (i % 16) : i % 16 + 8);
    }
    static constexpr int high_at(int i) { return four_at(i / 8, 2 * (i % 8) + 1); }
    static constexpr int four_at(int half, int i) { return 16 * T + 4 * T * (24 * half + i); }

    static size_t tile_size(int64_t n_in) { return n_in / 256 * TILE_BLOCK; }

    static void pack_row(const uint8_t * row, int64_t n_in, int lane, uint8_t * tile) {
        for (int64_t b = 0; b < n_in / 256; ++b, row += ROW_BLOCK, tile += TILE_BLOCK) {
            for (int i = 0; i < 32; ++i) {
                std::memcpy(tile + low_at(i) + 4 * lane, row + 4 * i, 4);
            }
            for (int i = 0; i < 16; ++i) {
                std::memcpy(tile + high_at(i) + 4 * lane, row + 128 + 4 * i, 4);
            }
            for (int i = 0; i < 16; ++i) {
                tile[i * T + lane] = row[192 + i];
            }
            std::memcpy(tile + D_AT + 2 * lane, row + 208, 2);
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
        return V::both(V::template bits<QUARTER / 2 * 4>(V::load(block + low_at(low)), 15),
                       V::template bits<QUARTER * 2 - 4>(V::load(block + high_at(high)), 48));
    }

    // total[r] += what the sixteenth I adds, in units of the block's scale.
    template <int I, int R>
    static void add_sixteenth(typename V::F (&total)[R], const uint8_t * block,
                              const uint8_t * scales, const Rows<R> & x) {
        prefetch<TILE_BLOCK / 16>(block + I * (TILE_BLOCK / 16), x);
        typename V::I sum[R];
        for (int r = 0; r < R; ++r) {
            sum[r] = V::spread(reinterpret_cast<const Block256 *>(x[r])->biases[I]);
        }
        V::template dot<4, 63>(sum, [&](int k) { return weights<I>(block, k); }, x, 16 * I);
        const auto scale = V::signed_bytes(scales + I * T);
        for (int r = 0; r < R; ++r) {
            total[r] = V::mul_add(V::to_float(sum[r]), scale, total[r]);
        }
    }

    template <int R, int... I>
    static void add_sixteenths(typename V::F (&total)[R], const uint8_t * block,
                               const uint8_t * scales, const Rows<R> & x,
                               std::integer_sequence<int, I...>) {
        (add_sixteenth<I>(total, block, scales, x), ...);
    }

    template <int R>
    static void multiply(const uint8_t * tile, int64_t n_in, Rows<R> x, typename V::F (&acc)[R]) {
        for (int64_t b = 0; b < n_in / 256; ++b) {
            // All at once: the hardware's fetches do not follow loads that go back.
            uint8_t scales[16 * T];
            for (int i = 0; i < 16 * T; i += 4 * T) {
                V::store_bytes(scales + i, V::load(tile + i));
            }
            typename V::F total[R];
            for (int r = 0; r < R; ++r) {
                total[r] = V::zero();
            }
            add_sixteenths<R>(total, tile, scales, x, std::make_integer_sequence<int, 16>());
            const auto d = V::halves(tile + D_AT);
            for (int r = 0; r < R; ++r) {
                const auto d_x = V::spread(reinterpret_cast<const Block256 *>(x[r])->d);
                acc[r] = V::mul_add(total[r], V::mul(d, d_x), acc[r]);
            }
            tile += TILE_BLOCK;
            x.advance(sizeof(Block256));
        }
    }
};

} // namespace
} // namespace dfl::cpu
