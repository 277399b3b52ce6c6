// Q4_K and Q5_K: 256 weights of 4 or 5 bits in 8 parts with a 6-bit scale and minimum each. In a
// tile of T outputs, a block has the parts' scales and minima (Scales6); the nibbles in ggml's
// order, [32][T][4] bytes, of which the first eight each follow [T][4] bytes of Q5_K's fifth bits;
// the block's scale, [T]; and its scale of minima, [T].
#pragma once

#include "cpu/matmul/blocks_256.h"
#include "cpu/matmul/scales_6.h"

namespace dfl::cpu {
namespace {

template <class V, bool FIVE>
struct Q45K : Blocks256<V, Q45K<V, FIVE>, 8> {
    using F = typename V::F;
    static constexpr ggml_type TYPE = FIVE ? GGML_TYPE_Q5_K : GGML_TYPE_Q4_K;
    static constexpr int T = V::T, HIGH = FIVE ? 8 : 0, FOURS = HIGH + 32;
    static constexpr int ROW_BLOCK = 16 + 4 * FOURS, TILE_BLOCK = ROW_BLOCK * T;
    static constexpr int FOURS_AT = 12 * T, HALVES_AT = FOURS_AT + 4 * FOURS * T;
    static constexpr int SCALE_BYTES = 16 * T; // bytes of a block's unpacked scales and minima
    static constexpr int LARGEST = FIVE ? 31 : 15;
    static constexpr int32_t OFFSET = 0;
    static constexpr int MINIMA = 4;

    // Returns the offset in a tile's block of an output's i-th 4 bytes: fifth bits, then nibbles.
    static constexpr int four_at(int i) {
        const bool is_paired = i < 2 * HIGH;
        return FOURS_AT + 4 * T * (is_paired ? i % 8 * 2 + i / 8 : i);
    }

    // Calls copy(first, stride, n) for groups of 4 bytes with equal stride in a tile. GCC 12
    // miscompiles a single loop over all groups at -O3.
    template <class Copy>
    static void for_fours(Copy && copy) {
        if constexpr (FIVE) {
            copy(0, 8 * T, HIGH);
            copy(HIGH, 8 * T, HIGH);
        }
        copy(2 * HIGH, 4 * T, FOURS - 2 * HIGH);
    }

    static void pack_block(const uint8_t * row, int lane, uint8_t * tile) {
        std::memcpy(tile + HALVES_AT + 2 * lane, row, 2);
        std::memcpy(tile + HALVES_AT + 2 * T + 2 * lane, row + 2, 2);
        Scales6<V>::pack(row + 4, lane, tile);
        for_fours([&](int first, int stride, int n) {
            copy_fours(row + 16 + 4 * first, 4, tile + four_at(first) + 4 * lane, stride, n, 0);
        });
    }

    static void read_scales(const uint8_t * block, uint8_t * scales) {
        Scales6<V>::to_bytes(block, scales);
    }

    template <int I, int K>
    static typename V::I weights(const uint8_t * block) {
        const auto pair = V::load(block + four_at(HIGH + I / 2 * 8 + K));
        const auto nibbles = V::template bits<I % 2 * 4>(pair, 15);
        if constexpr (FIVE) {
            return V::both(nibbles, V::template bits<I - 4>(V::load(block + four_at(K)), 16));
        }
        return nibbles;
    }

    // Returns the minima of parts 2 I and 2 I + 1, which multiply x.sums[2 I] and [2 I + 1].
    static typename V::I minima(const uint8_t * scales, int i) {
        return V::pairs(scales + 8 * T + i * 2 * T);
    }
    static const void * sums(const Block256 & x, int i) { return x.sums + 2 * i; }
};

template <class V>
using Q4_K = Q45K<V, false>;
template <class V>
using Q5_K = Q45K<V, true>;

} // namespace
} // namespace dfl::cpu
