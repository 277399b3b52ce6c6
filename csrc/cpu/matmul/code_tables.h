// What the nibbles of IQ4_NL, IQ4_XS and MXFP4 stand for.
#pragma once

#include "cpu/matmul/tiles.h"

namespace dfl::cpu {
namespace {

constexpr int8_t CODES_NL[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                 1,    13,   25,  38,  53,  69,  89,  113};
// Twice the values of 4-bit floats.
constexpr int8_t CODES_FP4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// As V stores signed weights.
template <class V>
struct Codes {
    uint8_t bytes[16];

    constexpr explicit Codes(const int8_t (&codes)[16]) : bytes() {
        for (int i = 0; i < 16; ++i) {
            bytes[i] = static_cast<uint8_t>(codes[i] + V::SIGNED_OFFSET);
        }
    }
};

// sum[r] += the products of 32 weights, nibbles as ggml pairs them, [4][T][4], with inputs from at
// on: the lower nibbles are the first 16, the upper ones the last. Always inlined: a call takes the
// sums through memory, which halves the speed of 8 rows.
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
