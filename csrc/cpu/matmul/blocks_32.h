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
    using F = typename V::F;
    using BlockX = std::conditional_t<W::MINIMA, Block32Sum, Block32>;
    static constexpr ggml_type TYPE = W::TYPE;
    static constexpr bool BYTES = W::FOURS == 8; // true if a weight is stored as a byte
    static constexpr int BLOCK = 32, T = V::T, MAX_ROWS = V::MAX_ROWS_32;
    static constexpr int PARTS_OF_256 = BYTES ? 0 : 8;
    using Fetch = std::conditional_t<BYTES, typename V::FetchBytes, typename V::Fetch>;
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
            quantize_blocks_32<V>(x, n_in, W::OFFSET, dst);
        }
    }

    template <int R>
    static void multiply(const uint8_t * tile, int64_t n_in, Rows<R> x, F (&acc)[1][R]) {
        for (int64_t b = 0; b < n_in / 32; ++b) {
            const uint8_t *scales = tile + scales_at(b), *weights = tile + weights_at(b);
            prefetch<Fetch, WEIGHTS_BLOCK>(weights, x.ahead);
            prefetch<Fetch, SCALES_BLOCK>(scales, x.ahead);
            add_block<1, R>(
                acc, x, 0,
                [&](int, auto k) { return W::template weights<decltype(k)::value>(weights); },
                [&](int) { return W::scales(scales); },
                [&](int) { return V::halves(scales + 2 * T); });
            x.advance(sizeof(BlockX));
        }
    }

    // Blocks of a tile's weights as bytes, [8][8][T][4].
    struct Unpacked {
        uint8_t weights[256 * T];
        F d[8], minima[8];
    };
    static constexpr int UNPACKED_INPUTS = 256, UNPACKED_X = 8 * sizeof(BlockX);

    static void unpack(const uint8_t * tile, int64_t n_in, int64_t step, Unpacked & to) {
        const int64_t n = n_blocks(n_in, step);
        for (int64_t i = 0; i < n; ++i) {
            const uint8_t *scales = tile + scales_at(8 * step + i),
                          *weights = tile + weights_at(8 * step + i);
            for_each<8>([&](auto k) {
                V::store_bytes(to.weights + (8 * i + k) * 4 * T,
                               W::template weights<decltype(k)::value>(weights));
            });
            to.d[i] = W::scales(scales);
            if constexpr (W::MINIMA) {
                to.minima[i] = V::halves(scales + 2 * T);
            }
        }
    }

    template <int TILES, int R>
    static void multiply_unpacked(const Unpacked * tiles, int64_t n_in, int64_t step,
                                  const Rows<R> & x, F (&acc)[TILES][R]) {
        const int64_t n = n_blocks(n_in, step);
        for (int64_t i = 0; i < n; ++i) {
            add_block<TILES, R>(
                acc, x, i * sizeof(BlockX),
                [&](int t, int k) { return V::load(tiles[t].weights + (8 * i + k) * 4 * T); },
                [&](int t) { return tiles[t].d[i]; }, [&](int t) { return tiles[t].minima[i]; });
        }
    }

  private:
    static int64_t n_blocks(int64_t n_in, int64_t step) {
        return std::min<int64_t>(8, n_in / 32 - 8 * step);
    }
    static const BlockX & block_of(const uint8_t * x) {
        return *reinterpret_cast<const BlockX *>(x);
    }
    static int32_t start(const uint8_t * x) {
        if constexpr (W::MINIMA) {
            return 0;
        } else {
            return block_of(x).start;
        }
    }

    // Adds the products of a block of weights with the block at byte `at` of each row of x to acc.
    template <int TILES, int R, class OfWeights, class D, class Minima>
    static void add_block(F (&acc)[TILES][R], const Rows<R> & x, int64_t at, OfWeights weights, D d,
                          Minima minima) {
        typename V::I sum[TILES][R];
        V::template dot<W, 8>(sum, weights, x, at, [&](int r) { return start(x[r] + at); });
        for (int t = 0; t < TILES; ++t) {
            const auto scales = d(t);
            for (int r = 0; r < R; ++r) {
                const BlockX & block = block_of(x[r] + at);
                const auto both = V::mul(scales, V::spread(block.d));
                acc[t][r] = V::mul_add(V::to_float(sum[t][r]), both, acc[t][r]);
                if constexpr (W::MINIMA) {
                    acc[t][r] = V::mul_add(minima(t), V::spread(block.sum), acc[t][r]);
                }
            }
        }
    }
};

} // namespace
} // namespace dfl::cpu
