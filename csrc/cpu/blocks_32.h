// Types in blocks of 32 weights with one scale, which ggml stores before them.
#pragma once

#include "tiles.h"

namespace dfl::cpu {
namespace {

template <class V, template <class> class Weights>
struct Blocks32 {
    using W = Weights<V>;
    using Vector = V;
    static constexpr ggml_type TYPE = W::TYPE;
    static constexpr int BLOCK = 32, T = V::T, MAX_ROWS = V::MAX_ROWS;
    static constexpr int ROW_BLOCK = 2 + 4 * W::FOURS; // bytes of a block of one row
    static constexpr int TILE_BLOCK =
        4 * W::FOURS * T; // bytes of a block of a tile, without scales

    static size_t tile_size(int64_t n_in) { return n_in / 32 * (ROW_BLOCK * T); }
    static int64_t scales_at(int64_t n_in) { return n_in / 32 * TILE_BLOCK; }

    static void pack_row(const uint8_t * row, int64_t n_in, int lane, uint8_t * tile) {
        uint8_t * scales = tile + scales_at(n_in);
        for (int64_t b = 0; b < n_in / 32; ++b, row += ROW_BLOCK) {
            std::memcpy(scales + (b * T + lane) * 2, row, 2);
            copy_fours(row + 2, 4, tile + b * TILE_BLOCK + 4 * lane, 4 * T, W::FOURS, W::FLIP);
        }
    }

    static void unpack_row(const uint8_t * tile, int64_t n_in, int lane, uint8_t * row) {
        const uint8_t * scales = tile + scales_at(n_in);
        for (int64_t b = 0; b < n_in / 32; ++b, row += ROW_BLOCK) {
            std::memcpy(row, scales + (b * T + lane) * 2, 2);
            copy_fours(tile + b * TILE_BLOCK + 4 * lane, 4 * T, row + 2, 4, W::FOURS, W::FLIP);
        }
    }

    static size_t quantized_row_size(int64_t n_in) { return n_in / 32 * sizeof(Block32); }
    static void quantize_row(const float * x, int64_t n_in, void * dst) {
        quantize_blocks_32(x, n_in, W::OFFSET, dst);
    }

    template <int R>
    static void multiply(const uint8_t * tile, int64_t n_in, Rows<R> x, typename V::F (&acc)[R]) {
        const uint8_t * scales = tile + scales_at(n_in);
        for (int64_t b = 0; b < n_in / 32; ++b) {
            prefetch<TILE_BLOCK>(tile);
            prefetch<2 * T>(scales);
            typename V::I sum[R];
            for (int r = 0; r < R; ++r) {
                sum[r] = V::spread(block_32(x[r])->bias);
            }
            W::template dot<R>(sum, tile, x);
            const auto d = V::halves(scales);
            for (int r = 0; r < R; ++r) {
                const auto both = V::mul(d, V::spread(block_32(x[r])->d));
                acc[r] = V::mul_add(V::to_float(sum[r]), both, acc[r]);
            }
            tile += TILE_BLOCK;
            scales += 2 * T;
            x.advance(sizeof(Block32));
        }
    }

  private:
    static const Block32 * block_32(const uint8_t * x) {
        return reinterpret_cast<const Block32 *>(x);
    }
};

} // namespace
} // namespace dfl::cpu
