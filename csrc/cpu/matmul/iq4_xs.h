// IQ4_XS: 256 weights as 4-bit codes of a table, in 8 parts with a 6-bit scale, less 32, each. In a
// tile of T outputs, a block has the parts' scales as bytes, [8][T], the codes in ggml's order,
// [32][T][4], the block's scale, [T], and padding to a vector.
#pragma once

#include "cpu/matmul/blocks_256.h"
#include "cpu/matmul/code_tables.h"

namespace dfl::cpu {
namespace {

template <class V>
struct IQ4_XS : Blocks256<V, IQ4_XS<V>, 8> {
    static constexpr ggml_type TYPE = GGML_TYPE_IQ4_XS;
    static constexpr int T = V::T, FOURS_AT = 8 * T, HALVES_AT = FOURS_AT + 128 * T;
    static constexpr int ROW_BLOCK = 136, TILE_BLOCK = HALVES_AT + 4 * T;
    static constexpr int LARGEST = SIGNED;
    static constexpr int32_t OFFSET = V::SIGNED_OFFSET;
    static constexpr Codes CODES{CODES_NL, OFFSET};

    static void pack_block(const uint8_t * row, int lane, uint8_t * tile) {
        std::memcpy(tile + HALVES_AT + 2 * lane, row, 2);
        for (int i = 0; i < 8; ++i) {
            const int low = row[4 + i / 2] >> i % 2 * 4 & 15;
            const int high = row[2 + i / 4] >> i % 4 * 2 & 3;
            tile[i * T + lane] = static_cast<uint8_t>((low | high << 4) - 32);
        }
        copy_fours(row + 8, 4, tile + FOURS_AT + 4 * lane, 4 * T, 32, 0);
    }

    static int32_t start(const Block256 & x, int i) { return -OFFSET * x.sums[i]; }
    template <int I, int K>
    static typename V::I weights(const uint8_t * block) {
        return coded_weights<V, K>(CODES, block + FOURS_AT + I * 16 * T);
    }
};

} // namespace
} // namespace dfl::cpu
