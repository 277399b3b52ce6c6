// Q8_0: 32 bytes and a scale. A tile is its bytes, [n_in / 4][T][4], then its scales,
// [n_in / 32][T].
#pragma once

#include "tiles.h"

namespace dfl::cpu {
namespace {

template <class V>
struct Q8_0 {
    static constexpr ggml_type TYPE = GGML_TYPE_Q8_0;
    static constexpr int BLOCK = 32, T = V::T, MAX_ROWS = V::MAX_ROWS;
    static constexpr uint8_t FLIP = V::SIGNED_OFFSET; // adds 128 to a signed byte

    static size_t tile_size(int64_t n_in) { return n_in / 32 * (34 * T); }

    static void pack_row(const uint8_t * row, int64_t n_in, int lane, uint8_t * tile) {
        uint8_t * scales = tile + n_in * T;
        for (int64_t b = 0; b < n_in / 32; ++b, row += 34) {
            std::memcpy(scales + (b * T + lane) * 2, row, 2);
            copy_fours(row + 2, 4, tile + (b * 8 * T + lane) * 4, 4 * T, 8, FLIP);
        }
    }

    static void unpack_row(const uint8_t * tile, int64_t n_in, int lane, uint8_t * row) {
        const uint8_t * scales = tile + n_in * T;
        for (int64_t b = 0; b < n_in / 32; ++b, row += 34) {
            std::memcpy(row, scales + (b * T + lane) * 2, 2);
            copy_fours(tile + (b * 8 * T + lane) * 4, 4 * T, row + 2, 4, 8, FLIP);
        }
    }

    static size_t quantized_row_size(int64_t n_in) { return n_in / 32 * sizeof(Block32); }
    static void quantize_row(const float * x, int64_t n_in, void * dst) {
        quantize_blocks_32(x, n_in, V::SIGNED_OFFSET, dst);
    }

    template <int R>
    static void multiply(const uint8_t * tile, int64_t n_in, Rows<R> x, typename V::F (&acc)[R]) {
        const uint8_t * scales = tile + n_in * T;
        for (int64_t b = 0; b < n_in / 32; ++b) {
            typename V::I sum[R];
            for (int r = 0; r < R; ++r) {
                sum[r] = V::spread(block_32(x[r])->bias);
            }
            V::template dot_signed<8>(sum, [&](int k) { return V::load(tile + k * 4 * T); }, x, 0);
            const auto d = V::halves(scales);
            for (int r = 0; r < R; ++r) {
                const auto both = V::mul(d, V::spread(block_32(x[r])->d));
                acc[r] = V::mul_add(V::to_float(sum[r]), both, acc[r]);
            }
            tile += 32 * T;
            scales += 2 * T;
            x.advance(sizeof(Block32));
        }
    }
};

} // namespace
} // namespace dfl::cpu
