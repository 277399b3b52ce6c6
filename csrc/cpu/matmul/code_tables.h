// Values of the 4-bit codes of IQ4_NL, IQ4_XS and MXFP4.
#pragma once

#include "cpu/matmul/tiles.h"

namespace dfl::cpu {
namespace {

constexpr int8_t CODES_NL[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                 1,    13,   25,  38,  53,  69,  89,  113};
// Values of 4-bit floats (E2M1), times 2.
constexpr int8_t CODES_FP4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Code table with an offset added to each value.
struct Codes {
    uint8_t bytes[16];

    constexpr Codes(const int8_t (&codes)[16], int32_t offset) : bytes() {
        for (int i = 0; i < 16; ++i) {
            bytes[i] = static_cast<uint8_t>(codes[i] + offset);
        }
    }
};

// Returns the weights of inputs [4 K, 4 K + 4) of 32. pairs: codes in ggml's nibble order,
// [4][T][4].
template <class V, int K>
inline typename V::I coded_weights(const Codes & codes, const uint8_t * pairs) {
    const auto pair = V::load(pairs + K % 4 * 4 * V::T);
    return V::look_up(codes.bytes, V::template bits<K / 4 * 4>(pair, 15));
}

} // namespace
} // namespace dfl::cpu
