// 6-bit scales and minima of Q4_K and Q5_K: 8 of each for every 256 weights.
#pragma once

#include "cpu/matmul/tiles.h"

namespace dfl::cpu {
namespace {

// Scales and minima of a tile of T outputs, 12 bytes for each output. Unpacked they are 16 * T
// bytes: scales [8][T], then minima [4][T][2]. Packed, two vectors hold the low 4 bits of the four
// quarters of these bytes, a third vector their upper 2 bits.
template <class V>
struct Scales6 {
    static constexpr int T = V::T, QUARTER = 4 * T;

    // Returns the unpacked place of an output's i-th number: 0 to 7 are scales, 8 to 15 minima.
    static int place(int i, int lane) {
        return i < 8 ? i * T + lane : 8 * T + (i - 8) / 2 * 2 * T + 2 * lane + i % 2;
    }

    // Byte and shift of the lower 4 and of the upper 2 bits of a number in ggml's 12 bytes.
    struct Bits {
        int low, low_shift, high, high_shift;
    };
    static Bits bits_of(int i) {
        const int j = i % 8, is_min = i / 8;
        if (j < 4) {
            return {j + 4 * is_min, 0, j + 4 * is_min, 4};
        }
        return {j + 4, 4 * is_min, j - 4 + 4 * is_min, 6};
    }

    static void pack(const uint8_t * row, int lane, uint8_t * tile) {
        for (int i = 0; i < 16; ++i) {
            const Bits from = bits_of(i);
            const int low = row[from.low] >> from.low_shift & 15;
            const int high = row[from.high] >> from.high_shift & 3;
            const int at = place(i, lane), quarter = at / QUARTER, byte = at % QUARTER;
            tile[quarter / 2 * QUARTER + byte] |= low << quarter % 2 * 4;
            tile[2 * QUARTER + byte] |= high << quarter * 2;
        }
    }

    static void to_bytes(const uint8_t * tile, uint8_t * bytes) {
        const auto first = V::load(tile), second = V::load(tile + QUARTER),
                   high = V::load(tile + 2 * QUARTER);
        const auto quarter = [&](int i, auto low, auto upper) {
            V::store_bytes(bytes + i * QUARTER, V::both(low, upper));
        };
        quarter(0, V::template bits<0>(first, 15), V::template bits<-4>(high, 48));
        quarter(1, V::template bits<4>(first, 15), V::template bits<-2>(high, 48));
        quarter(2, V::template bits<0>(second, 15), V::template bits<0>(high, 48));
        quarter(3, V::template bits<4>(second, 15), V::template bits<2>(high, 48));
    }
};

} // namespace
} // namespace dfl::cpu
