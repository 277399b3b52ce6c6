// Q2_K and Q3_K: 256 weights of 2 or 3 bits in 16 parts. Parts of Q2_K have a 4-bit scale and a
// 4-bit minimum; parts of Q3_K have a 6-bit scale, less 32, and weights less 4. In a tile of T
// outputs, a block has the parts' scales as bytes, [16][T]; the weights' lower 2 bits in ggml's
// order, four weights a byte, [16][T][4], of which the first eight each follow [T][4] bytes of
// Q3_K's upper bits; the block's scale, [T]; Q2_K's scale of minima, [T]; and padding to a vector.
#pragma once

#include "cpu/matmul/blocks_256.h"

namespace dfl::cpu {
namespace {

template <class V, bool THREE>
struct Q23K : Blocks256<V, Q23K<V, THREE>, 16> {
    using F = typename V::F;
    static constexpr ggml_type TYPE = THREE ? GGML_TYPE_Q3_K : GGML_TYPE_Q2_K;
    static constexpr int MINIMA = THREE ? 0 : 16;
    static constexpr int T = V::T;
    static constexpr int HALVES = THREE ? 1 : 2, HIGH = THREE ? 8 : 0;
    static constexpr int ROW_BLOCK = THREE ? 110 : 84;
    static constexpr int FOURS_AT = 16 * T, HALVES_AT = FOURS_AT + 4 * (HIGH + 16) * T;
    static constexpr int TILE_BLOCK = HALVES_AT + 4 * T;
    static constexpr int SCALE_BYTES = 32 * T; // bytes of a block's unpacked scales and minima
    static constexpr int LARGEST = THREE ? 7 : 3;
    static constexpr int32_t OFFSET = THREE ? 4 : 0;
    using Starts = std::conditional_t<THREE, V, PairSums>;
    static constexpr int ROW_SCALES = THREE ? 96 : 0, ROW_HALVES = THREE ? 108 : 80;
    static constexpr int ROW_LOW = THREE ? 32 : 16;

    static constexpr int high_at(int i) { return FOURS_AT + 4 * T * (2 * i); }
    static constexpr int low_at(int i) {
        return FOURS_AT + 4 * T * (i < HIGH ? 2 * i + 1 : HIGH + i);
    }

    // Returns the scale of part i. Q3_K stores the lower 4 bits of two scales in each of 8 bytes,
    // then the upper 2 bits of four scales in each of 4 bytes.
    static uint8_t scale_of(const uint8_t * row, int i) {
        if constexpr (THREE) {
            const int low = row[i % 8] >> i / 8 * 4 & 15, high = row[8 + i % 4] >> i / 4 * 2 & 3;
            return static_cast<uint8_t>((low | high << 4) - 32);
        } else {
            return row[i];
        }
    }

    static void pack_block(const uint8_t * row, int lane, uint8_t * tile) {
        for (int i = 0; i < HALVES; ++i) {
            std::memcpy(tile + HALVES_AT + 2 * (i * T + lane), row + ROW_HALVES + 2 * i, 2);
        }
        for (int i = 0; i < 16; ++i) {
            tile[i * T + lane] = scale_of(row + ROW_SCALES, i);
        }
        for (int i = 0; i < HIGH; ++i) {
            std::memcpy(tile + high_at(i) + 4 * lane, row + 4 * i, 4);
        }
        for (int i = 0; i < 16; ++i) {
            std::memcpy(tile + low_at(i) + 4 * lane, row + ROW_LOW + 4 * i, 4);
        }
    }

    static void read_scales(const uint8_t * block, uint8_t * scales) {
        for (int i = 0; i < 16 * T; i += 4 * T) {
            const auto both = V::load(block + i);
            V::store_bytes(scales + i, THREE ? both : V::template bits<0>(both, 15));
            V::store_bytes(scales + 16 * T + i, V::template bits<4>(both, 15));
        }
    }

    // Returns the weights of inputs [4 K, 4 K + 4) of part I of a block. Of 128 weights, byte b of
    // 32 holds the lower 2 bits of weights b, b + 32, b + 64 and b + 96.
    template <int I, int K>
    [[gnu::always_inline]] static typename V::I weights(const uint8_t * block) {
        constexpr int HALF = I / 8, FOURTH = I / 2 % 4, SIDE = I % 2;
        const auto low =
            V::template bits<2 * FOURTH>(V::load(block + low_at(HALF * 8 + SIDE * 4 + K)), 3);
        if constexpr (THREE) {
            const auto high = V::load(block + high_at(SIDE * 4 + K));
            return V::both(low, V::template bits<HALF * 4 + FOURTH - 2>(high, 4));
        }
        return low;
    }

    // Returns the minima of part I, which multiply both sums of x.starts[I].
    static typename V::I minima(const uint8_t * scales, int i) {
        return V::twice(scales + (16 + i) * T);
    }
    static const void * sums(const Block256 & x, int i) { return x.starts + i; }
};

template <class V>
using Q2_K = Q23K<V, false>;
template <class V>
using Q3_K = Q23K<V, true>;

} // namespace
} // namespace dfl::cpu
