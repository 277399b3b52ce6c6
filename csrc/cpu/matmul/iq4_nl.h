// IQ4_NL and MXFP4: blocks of 32 weights as 4-bit codes of a table. A tile of T outputs has the
// codes in ggml's order, [4][T][4] bytes.
#pragma once

#include "cpu/matmul/blocks_32.h"
#include "cpu/matmul/code_tables.h"

namespace dfl::cpu {
namespace {

template <class V, ggml_type OF>
struct Codes32 {
    static constexpr ggml_type TYPE = OF;
    static constexpr bool FP4 = OF == GGML_TYPE_MXFP4, MINIMA = false;
    static constexpr int FOURS = 4, SCALE = FP4 ? 1 : 2;
    static constexpr int LARGEST = FP4 ? 24 : SIGNED;
    static constexpr int32_t OFFSET = FP4 ? 12 : V::SIGNED_OFFSET;
    static constexpr Codes CODES{FP4 ? CODES_FP4 : CODES_NL, OFFSET};

    static void pack(const uint8_t * row, uint8_t * tile) {
        copy_fours(row, 4, tile, 4 * V::T, FOURS, 0);
    }

    static typename V::F scales(const uint8_t * p) {
        if constexpr (FP4) {
            return V::half_powers(p);
        } else {
            return V::halves(p);
        }
    }

    template <int K>
    static typename V::I weights(const uint8_t * block) {
        return coded_weights<V, K>(CODES, block);
    }
};

template <class V>
using IQ4_NL = Codes32<V, GGML_TYPE_IQ4_NL>;
template <class V>
using MXFP4 = Codes32<V, GGML_TYPE_MXFP4>;

} // namespace
} // namespace dfl::cpu
