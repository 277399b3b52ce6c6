// Q8_0: blocks of 32 weights as signed bytes, [8][T][4] in a tile of T outputs.
#pragma once

#include "cpu/matmul/blocks_32.h"

namespace dfl::cpu {
namespace {

template <class V>
struct Q8_0 {
    static constexpr ggml_type TYPE = GGML_TYPE_Q8_0;
    static constexpr int FOURS = 8, LARGEST = SIGNED;
    static constexpr int32_t OFFSET = V::SIGNED_OFFSET;
    static constexpr bool MINIMA = false;
    static constexpr int SCALE = 2;
    static constexpr uint8_t FLIP = V::SIGNED_OFFSET; // xor with 128 adds 128 to a signed byte

    static void pack(const uint8_t * row, uint8_t * tile) {
        copy_fours(row, 4, tile, 4 * V::T, FOURS, FLIP);
    }

    static typename V::F scales(const uint8_t * p) { return V::halves(p); }

    template <int K>
    static typename V::I weights(const uint8_t * block) {
        return V::load(block + K * 4 * V::T);
    }
};

} // namespace
} // namespace dfl::cpu
