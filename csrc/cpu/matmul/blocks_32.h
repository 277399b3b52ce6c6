// Quantised types with blocks of 32 weights: a scale, for some types a minimum, and the weights. A
// tile has groups of blocks: scales and minima of a group, [GROUP][1 or 2][T], which fill a vector
// so that no load crosses a cache line, then its weights. A tile is read as one stream, because the
// hardware prefetcher does not follow two.
#pragma once

#include "cpu/matmul/tiles.h"

#include <type_traits>

namespace dfl::cpu {
namespace {

template <class V, template <class> class Weights>
struct Blocks32 {
    using Vector = V;
    using W = Weights<V>;
    using BlockX = std::conditional_t<W::MINIMA, Block32Sum, Block32>;
    static constexpr ggml_type TYPE = W::TYPE;
    static constexpr int BLOCK = 32, T = V::T, MAX_ROWS = V::MAX_ROWS;
    static constexpr int SCALES = W::MINIMA ? 2 : 1;
    static constexpr int SCALE = W::SCALE;
    static constexpr int ROW_BLOCK = SCALE * SCALES + 4 * W::FOURS;
    // SCALES_BLOCK, WEIGHTS_BLOCK: bytes of a block's scales and minima, and of its weights.
    static constexpr int SCALES_BLOCK = SCALE * SCALES * T, WEIGHTS_BLOCK = 4 * W::FOURS * T;
    static constexpr int GROUP = 4 * T / SCALES_BLOCK;
    static constexpr int GROUP_SIZE = GROUP * (SCALES_BLOCK + WEIGHTS_BLOCK);
    static constexpr int UNFETCHED_ROWS = 3;

    // Returns a tile's bytes. The last group is not padded: a gap would stop hardware prefetches.
    static size_t tile_size(int64_t n_in) {
        const int64_t n = n_in / 32, n_groups = (n + GROUP - 1) / GROUP;
        return n_groups * GROUP * SCALES_BLOCK + n * WEIGHTS_BLOCK;
    }
    static int64_t scales_at(int64_t b) {
        return b / GROUP * GROUP_SIZE + b % GROUP * SCALES_BLOCK;
    }
    static int64_t weights_at(int64_t b) {
        return b / GROUP * GROUP_SIZE + GROUP * SCALES_BLOCK + b % GROUP * WEIGHTS_BLOCK;
    }

    static void pack_row(const uint8_t * row, int64_t n_in, int lane, uint8_t * tile) {
        for (int64_t b = 0; b < n_in / 32; ++b, row += ROW_BLOCK) {
            uint8_t * scales = tile + scales_at(b) + SCALE * lane;
            for (int i = 0; i < SCALES; ++i) {
                std::memcpy(scales + i * SCALE * T, row + SCALE * i, SCALE);
            }
            W::pack(row + SCALE * SCALES, tile + weights_at(b) + 4 * lane);
        }
    }

    static size_t quantized_row_size(int64_t n_in) { return n_in / 32 * sizeof(BlockX); }
    static void quantize_row(const float * x, int64_t n_in, void * dst) {
        if constexpr (W::MINIMA) {
            quantize_blocks_32_sum(x, n_in, dst);
        } else {
            quantize_blocks_32(x, n_in, W::OFFSET, dst);
        }
    }

    template <int R>
    static void multiply(const uint8_t * tile, int64_t n_in, Rows<R> x, typename V::F (&acc)[R]) {
        for (int64_t b = 0; b < n_in / 32; ++b) {
            const uint8_t *scales = tile + scales_at(b), *weights = tile + weights_at(b);
            prefetch<WEIGHTS_BLOCK>(weights, x);
            prefetch<SCALES_BLOCK>(scales, x);
            typename V::I sum[R];
            for (int r = 0; r < R; ++r) {
                sum[r] = V::spread(start(x[r]));
            }
            W::template dot<R>(sum, weights, x);
            const auto d = W::scales(scales);
            for (int r = 0; r < R; ++r) {
                const auto both = V::mul(d, V::spread(block_of(x[r])->d));
                acc[r] = V::mul_add(V::to_float(sum[r]), both, acc[r]);
                if constexpr (W::MINIMA) {
                    const auto minima = V::halves(scales + 2 * T);
                    acc[r] = V::mul_add(minima, V::spread(block_of(x[r])->sum), acc[r]);
                }
            }
            x.advance(sizeof(BlockX));
        }
    }

  private:
    static const BlockX * block_of(const uint8_t * x) {
        return reinterpret_cast<const BlockX *>(x);
    }
    static int32_t start(const uint8_t * x) {
        if constexpr (W::MINIMA) {
            return 0;
        } else {
            return block_of(x)->bias;
        }
    }
};

} // namespace
} // namespace dfl::cpu
