// Q8_0: 32 signed bytes and a scale. A tile is its bytes, [n_in / 32][8][T][4], then its scales,
// [n_in / 32][T].
#pragma once

#include "blocks_32.h"

namespace dfl::cpu {
namespace {

template <class V>
struct Q8_0 {
    static constexpr ggml_type TYPE = GGML_TYPE_Q8_0;
    static constexpr int FOURS = 8;
    static constexpr int32_t OFFSET = V::SIGNED_OFFSET;
    static constexpr uint8_t FLIP = V::SIGNED_OFFSET; // the top bit: adds 128 to a signed byte

    template <int R>
    static void dot(typename V::I (&sum)[R], const uint8_t * block, const Rows<R> & x) {
        V::template dot_signed<8>(sum, [&](int k) { return V::load(block + k * 4 * V::T); }, x, 0);
    }
};

} // namespace
} // namespace dfl::cpu
