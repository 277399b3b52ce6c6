// Q6_K: 256 weights of 6 bits, less 32, in 16 parts with an 8-bit scale each. In a tile of T
// outputs, a block has the parts' scales, [16][T], the nibbles in ggml's order, [32][T][4], mixed
// with the upper bits, [16][T][4], in order of use (one stream, for hardware prefetches), the
// block's scale, [T], and padding.
#pragma once

#include "cpu/matmul/blocks_256.h"

namespace dfl::cpu {
namespace {

template <class V>
struct Q6_K : Blocks256<V, Q6_K<V>, 16> {
    static constexpr ggml_type TYPE = GGML_TYPE_Q6_K;
    static constexpr int T = V::T, HALVES_AT = 208 * T;
    static constexpr int ROW_BLOCK = 210, TILE_BLOCK = 212 * T;
    static constexpr int LARGEST = 63;
    static constexpr int32_t OFFSET = 32;

    // Return the offset in a tile's block of an output's i-th 4 bytes of nibbles (low_at) or upper
    // bits (high_at). A half block has 8 pairs of nibbles and upper bits, then 8 groups of nibbles.
    static constexpr int low_at(int i) {
        return four_at(i / 16, i % 16 < 8 ? 2 * (i % 16) : i % 16 + 8);
    }
    static constexpr int high_at(int i) { return four_at(i / 8, 2 * (i % 8) + 1); }
    static constexpr int four_at(int half, int i) { return 16 * T + 4 * T * (24 * half + i); }

    static void pack_block(const uint8_t * row, int lane, uint8_t * tile) {
        for (int i = 0; i < 32; ++i) {
            std::memcpy(tile + low_at(i) + 4 * lane, row + 4 * i, 4);
        }
        for (int i = 0; i < 16; ++i) {
            std::memcpy(tile + high_at(i) + 4 * lane, row + 128 + 4 * i, 4);
        }
        for (int i = 0; i < 16; ++i) {
            tile[i * T + lane] = row[192 + i];
        }
        std::memcpy(tile + HALVES_AT + 2 * lane, row + 208, 2);
    }

    // Returns the weights of inputs [4 K, 4 K + 4) of part I of a block. Of 128 weights, byte b of
    // 64 holds nibbles of weights b and b + 64, byte b of 32 upper bits of b + 0, 32, 64 and 96.
    template <int I, int K>
    [[gnu::always_inline]] static typename V::I weights(const uint8_t * block) {
        constexpr int HALF = I / 8, QUARTER = I / 2 % 4, SIDE = I % 2;
        const int low = HALF * 16 + QUARTER % 2 * 8 + SIDE * 4 + K, high = HALF * 8 + SIDE * 4 + K;
        return V::both(V::template bits<QUARTER / 2 * 4>(V::load(block + low_at(low)), 15),
                       V::template bits<QUARTER * 2 - 4>(V::load(block + high_at(high)), 48));
    }
};

} // namespace
} // namespace dfl::cpu
