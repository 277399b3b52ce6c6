// Q4_0, Q4_1, Q5_0 and Q5_1: blocks of 32 weights. A tile of T outputs has the fifth bits of 5-bit
// types, [1][T][4] bytes, then nibbles in ggml's order, [4][T][4] bytes.
#pragma once

#include "cpu/matmul/blocks_32.h"

namespace dfl::cpu {
namespace {

template <class V, ggml_type OF, bool FIVE, bool MINIMA_TOO>
struct Nibbles32 {
    static constexpr ggml_type TYPE = OF;
    static constexpr int HIGH = FIVE ? 1 : 0, FOURS = HIGH + 4, T = V::T;
    static constexpr bool MINIMA = MINIMA_TOO;
    static constexpr int SCALE = 2, LARGEST = FIVE ? 31 : 15;
    static constexpr int32_t OFFSET = MINIMA ? 0 : FIVE ? 16 : 8;

    // Moves input i's fifth bit from bit i, as in ggml, to bit i / 4 of the input's byte i % 4.
    static uint32_t transposed(uint32_t bits) {
        uint32_t moved = 0;
        for (int i = 0; i < 32; ++i) {
            moved |= (bits >> i & 1) << (i % 4 * 8 + i / 4);
        }
        return moved;
    }

    static void pack(const uint8_t * row, uint8_t * tile) {
        copy_fours(row, 4, tile, 4 * T, FOURS, 0);
        if constexpr (FIVE) {
            const uint32_t bits = transposed(load_four(row));
            std::memcpy(tile, &bits, 4);
        }
    }

    static typename V::F scales(const uint8_t * p) { return V::halves(p); }

    // Low nibbles are a block's first 16 inputs, high nibbles its last 16.
    template <int K>
    static typename V::I weights(const uint8_t * block) {
        const auto pair = V::load(block + (HIGH + K % 4) * 4 * T);
        const auto nibbles = V::template bits<K / 4 * 4>(pair, 15);
        if constexpr (FIVE) {
            return V::both(nibbles, V::template bits<K - 4>(V::load(block), 16));
        }
        return nibbles;
    }

  private:
    static uint32_t load_four(const uint8_t * p) {
        uint32_t four;
        std::memcpy(&four, p, 4);
        return four;
    }
};

template <class V>
using Q4_0 = Nibbles32<V, GGML_TYPE_Q4_0, false, false>;
template <class V>
using Q4_1 = Nibbles32<V, GGML_TYPE_Q4_1, false, true>;
template <class V>
using Q5_0 = Nibbles32<V, GGML_TYPE_Q5_0, true, false>;
template <class V>
using Q5_1 = Nibbles32<V, GGML_TYPE_Q5_1, true, true>;

} // namespace
} // namespace dfl::cpu
