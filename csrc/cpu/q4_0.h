// Q4_0: 32 nibbles less 8, and a scale. A tile is its nibbles as ggml pairs them,
// [n_in / 32][4][T][4], then its scales, [n_in / 32][T].
#pragma once

#include "blocks_32.h"

namespace dfl::cpu {
namespace {

template <class V>
struct Q4_0 {
    static constexpr ggml_type TYPE = GGML_TYPE_Q4_0;
    static constexpr int FOURS = 4;
    static constexpr int32_t OFFSET = 8;
    static constexpr uint8_t FLIP = 0;

    template <int R>
    static void dot(typename V::I (&sum)[R], const uint8_t * block, const Rows<R> & x) {
        const auto weights = [&](int k) {
            const auto two = V::load(block + k % 4 * 4 * V::T);
            return k < 4 ? V::template bits<0>(two, 15) : V::template bits<4>(two, 15);
        };
        V::template dot<8, 15>(sum, weights, x, 0);
    }
};

} // namespace
} // namespace dfl::cpu
