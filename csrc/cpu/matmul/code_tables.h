// Values of the 4-bit codes of IQ4_NL, IQ4_XS and MXFP4.
#pragma once

#include "cpu/matmul/tiles.h"

namespace dfl::cpu {
namespace {

constexpr int8_t CODES_NL[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                 1,    13,   25,  38,  53,  69,  89,  113};
// Values of 4-bit floats (E2M1), times 2.
constexpr int8_t CODES_FP4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Code table with V::SIGNED_OFFSET added to each value, as V stores signed weights with an offset.
template <class V>
struct Codes {
    uint8_t bytes[16];

    constexpr explicit Codes(const int8_t (&codes)[16]) : bytes() {
        for (int i = 0; i < 16; ++i) {
            bytes[i] = static_cast<uint8_t>(codes[i] + V::SIGNED_OFFSET);
        }
    }
};

// Adds products of 32 weights with the inputs from `at` on to sum[r]. pairs: codes in ggml's nibble
// order, [4][T][4]. Always inlined: a call passes sums through memory.
template <class V, int R>
[[gnu::always_inline]] inline void dot_codes(typename V::I (&sum)[R], const Codes<V> & codes,
                                             const uint8_t * pairs, const Rows<R> & x, int64_t at) {
    V::template dot_signed<4>(
        sum,
        [&](int k) {
            const auto pair = V::load(pairs + k * 4 * V::T);
            return V::look_up(codes.bytes, V::template bits<0>(pair, 15));
        },
        x, at);
    V::template dot_signed<4>(
        sum,
        [&](int k) {
            const auto pair = V::load(pairs + k * 4 * V::T);
            return V::look_up(codes.bytes, V::template bits<4>(pair, 15));
        },
        x, at + 16);
}

} // namespace
} // namespace dfl::cpu
