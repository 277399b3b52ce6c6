// IQ4_XS: 256 nibbles that stand for other numbers, in eighths with a scale of 6 bits less 32 each.
// A block of a tile is the eighths' scales as bytes, [8][T], the nibbles as ggml pairs them,
// [32][T][4], the scale [T], and what fills a vector.
#pragma once

#include "cpu/matmul/code_tables.h"

namespace dfl::cpu {
namespace {

template <class V>
struct IQ4_XS {
    using Vector = V;
    static constexpr ggml_type TYPE = GGML_TYPE_IQ4_XS;
    static constexpr int BLOCK = 256, T = V::T, MAX_ROWS = V::MAX_ROWS;
    static constexpr int UNFETCHED_ROWS = 2;
    static constexpr int ROW_BLOCK = 136, FOURS_AT = 8 * T;
    static constexpr int D_AT = FOURS_AT + 128 * T, TILE_BLOCK = D_AT + 4 * T;
    static constexpr Codes<V> CODES{CODES_NL};

    static size_t tile_size(int64_t n_in) { return n_in / 256 * TILE_BLOCK; }

    // A row's block is the scale, the upper 2 bits of the eighths' scales, their lower 4, and the
    // nibbles.
    static void pack_row(const uint8_t * row, int64_t n_in, int lane, uint8_t * tile) {
        for (int64_t b = 0; b < n_in / 256; ++b, row += ROW_BLOCK, tile += TILE_BLOCK) {
            std::memcpy(tile + D_AT + 2 * lane, row, 2);
            for (int i = 0; i < 8; ++i) {
                const int low = row[4 + i / 2] >> i % 2 * 4 & 15;
                const int high = row[2 + i / 4] >> i % 4 * 2 & 3;
                tile[i * T + lane] = static_cast<uint8_t>((low | high << 4) - 32);
            }
            copy_fours(row + 8, 4, tile + FOURS_AT + 4 * lane, 4 * T, 32, 0);
        }
    }

    static size_t quantized_row_size(int64_t n_in) { return n_in / 256 * sizeof(Block256); }
    static void quantize_row(const float * x, int64_t n_in, void * dst) {
        quantize_blocks_256(x, n_in, dst);
    }

    // total[r] += what the eighth I adds, in units of the block's scale.
    template <int I, int R>
    static void add_eighth(typename V::F (&total)[R], const uint8_t * block, const uint8_t * scales,
                           const Rows<R> & x) {
        prefetch<TILE_BLOCK / 8>(block + I * (TILE_BLOCK / 8), x);
        typename V::I sum[R];
        for (int r = 0; r < R; ++r) {
            const auto * of_x = reinterpret_cast<const Block256 *>(x[r]);
            sum[r] = V::spread(-V::SIGNED_OFFSET * of_x->sums[I]);
        }
        dot_codes<V>(sum, CODES, block + FOURS_AT + I * 16 * T, x, 32 * I);
        const auto scale = V::signed_bytes(scales + I * T);
        for (int r = 0; r < R; ++r) {
            total[r] = V::mul_add(V::to_float(sum[r]), scale, total[r]);
        }
    }

    template <int R, int... I>
    static void add_eighths(typename V::F (&total)[R], const uint8_t * block,
                            const uint8_t * scales, const Rows<R> & x,
                            std::integer_sequence<int, I...>) {
        (add_eighth<I>(total, block, scales, x), ...);
    }

    template <int R>
    static void multiply(const uint8_t * tile, int64_t n_in, Rows<R> x, typename V::F (&acc)[R]) {
        for (int64_t b = 0; b < n_in / 256; ++b) {
            // All at once: the hardware's fetches do not follow loads that go back.
            uint8_t scales[8 * T];
            for (int i = 0; i < 8 * T; i += 4 * T) {
                V::store_bytes(scales + i, V::load(tile + i));
            }
            typename V::F total[R];
            for (int r = 0; r < R; ++r) {
                total[r] = V::zero();
            }
            add_eighths<R>(total, tile, scales, x, std::make_integer_sequence<int, 8>());
            const auto d = V::halves(tile + D_AT);
            for (int r = 0; r < R; ++r) {
                const auto d_x = V::spread(reinterpret_cast<const Block256 *>(x[r])->d);
                acc[r] = V::mul_add(total[r], V::mul(d, d_x), acc[r]);
            }
            tile += TILE_BLOCK;
            x.advance(sizeof(Block256));
        }
    }
};

} // namespace
} // namespace dfl::cpu
