// Quantised types with blocks of 256 weights in PARTS parts (sub-blocks), each with a scale. In a
// tile of T outputs, a block has F16 scales, [T], at byte HALVES_AT; formats define the rest.
#pragma once

#include "cpu/matmul/tiles.h"

namespace dfl::cpu {
namespace {

// Base class of formats with blocks of 256 weights. In formats with minima, scales are unsigned.
template <class V, class Format, int PARTS>
struct Blocks256 {
    using Vector = V;
    using F = typename V::F;
    using I = typename V::I;
    using Total = typename V::Total;
    using Starts = V;
    using Fetch = typename V::Fetch;
    static constexpr int BLOCK = 256, T = V::T, MAX_ROWS = V::MAX_ROWS_256;
    static constexpr int PARTS_OF_256 = PARTS;
    static constexpr int FOURS = 64 / PARTS; // groups of 4 inputs of a part
    static constexpr int UNFETCHED_ROWS = 2;
    static constexpr int SCALE_BYTES = PARTS * T;
    // Vectors of minima of a block, minima(scales, i), which multiply sums(x, i): two 16-bit sums.
    static constexpr int MINIMA = 0;
    static I minima(const uint8_t *, int) { return I{}; }

    static size_t tile_size(int64_t n_in) { return n_in / 256 * Format::TILE_BLOCK; }

    static void pack_row(const uint8_t * row, int64_t n_in, int lane, uint8_t * tile) {
        for (int64_t b = 0; b < n_in / 256; ++b) {
            Format::pack_block(row + b * Format::ROW_BLOCK, lane, tile + b * Format::TILE_BLOCK);
        }
    }

    static size_t quantized_row_size(int64_t n_in) { return n_in / 256 * sizeof(Block256); }
    static void quantize_row(const float * x, int64_t n_in, void * dst) {
        quantize_blocks_256<typename Format::Starts>(x, n_in, Format::OFFSET, dst);
    }

    // Reads all scales of a block first: going back would stop the hardware prefetcher.
    static void read_scales(const uint8_t * block, uint8_t * scales) {
        for (int i = 0; i < PARTS * T; i += 4 * T) {
            V::store_bytes(scales + i, V::load(block + i));
        }
    }

    // Returns the start of the sum over a block's part i.
    static int32_t start(const Block256 & x, int i) { return x.starts[i]; }

    template <int R>
    static void multiply(const uint8_t * tile, int64_t n_in, Rows<R> x, F (&acc)[1][R]) {
        constexpr int SHARE = Format::TILE_BLOCK / PARTS;
        for (int64_t b = 0; b < n_in / 256; ++b) {
            uint8_t scales[Format::SCALE_BYTES];
            Format::read_scales(tile, scales);
            Total total[1][R];
            clear(total);
            for_each<PARTS>([&](auto i) __attribute__((always_inline)) {
                constexpr int PART = decltype(i)::value;
                prefetch<Fetch, SHARE>(tile + PART * SHARE, x.ahead);
                V::template add_products<Format, FOURS>(
                    total,
                    [&](int, auto k) {
                        return Format::template weights<PART, decltype(k)::value>(tile);
                    },
                    [&](int) { return scale(scales, PART); }, x, 4 * FOURS * PART,
                    [&](int r) { return Format::start(block_of(x[r]), PART); });
            });
            add_block<1, R>(
                acc, total, x, [&](int) { return V::halves(tile + Format::HALVES_AT); },
                [&](int) { return V::halves(tile + Format::HALVES_AT + 2 * T); },
                [&](int, int i) { return Format::minima(scales, i); });
            tile += Format::TILE_BLOCK;
            x.advance(sizeof(Block256));
        }
    }

    // A block of a tile's weights as bytes, [64][T][4].
    struct Unpacked {
        uint8_t weights[256 * T];
        typename V::Scale scales[PARTS];
        I minima[Format::MINIMA + 1];
        F d, d_min;
    };
    static constexpr int UNPACKED_INPUTS = 256, UNPACKED_X = sizeof(Block256);

    static void unpack(const uint8_t * tile, int64_t, int64_t step, Unpacked & to) {
        const uint8_t * block = tile + step * Format::TILE_BLOCK;
        uint8_t scales[Format::SCALE_BYTES];
        Format::read_scales(block, scales);
        for_each<PARTS>([&](auto i) {
            constexpr int PART = decltype(i)::value;
            to.scales[PART] = scale(scales, PART);
            for_each<FOURS>([&](auto k) {
                V::store_bytes(to.weights + (FOURS * PART + k) * 4 * T,
                               Format::template weights<PART, decltype(k)::value>(block));
            });
        });
        to.d = V::halves(block + Format::HALVES_AT);
        if constexpr (Format::MINIMA > 0) {
            to.d_min = V::halves(block + Format::HALVES_AT + 2 * T);
            for (int i = 0; i < Format::MINIMA; ++i) {
                to.minima[i] = Format::minima(scales, i);
            }
        }
    }

    template <int TILES, int R>
    static void multiply_unpacked(const Unpacked * tiles, int64_t, int64_t, const Rows<R> & x,
                                  F (&acc)[TILES][R]) {
        Total total[TILES][R];
        clear(total);
        for (int i = 0; i < PARTS; ++i) {
            V::template add_products<Format, FOURS>(
                total,
                [&](int t, int k) { return V::load(tiles[t].weights + (FOURS * i + k) * 4 * T); },
                [&](int t) { return tiles[t].scales[i]; }, x, 4 * FOURS * i,
                [&](int r) { return Format::start(block_of(x[r]), i); });
        }
        add_block<TILES, R>(
            acc, total, x, [&](int t) { return tiles[t].d; }, [&](int t) { return tiles[t].d_min; },
            [&](int t, int i) { return tiles[t].minima[i]; });
    }

  private:
    static const Block256 & block_of(const uint8_t * x) {
        return *reinterpret_cast<const Block256 *>(x);
    }

    static typename V::Scale scale(const uint8_t * scales, int part) {
        return V::template scale < Format::MINIMA == 0 > (scales + part * T);
    }

    // Adds the products of a block to acc: total times d, less minima times d_min.
    template <int TILES, int R, class D, class DMin, class Minima>
    static void add_block(F (&acc)[TILES][R], const Total (&total)[TILES][R], const Rows<R> & x,
                          D d, DMin d_min, Minima minima) {
        for (int t = 0; t < TILES; ++t) {
            for (int r = 0; r < R; ++r) {
                const auto both = V::mul(d(t), V::spread(block_of(x[r]).d));
                acc[t][r] = V::mul_add(V::total_to_float(total[t][r]), both, acc[t][r]);
            }
        }
        if constexpr (Format::MINIMA > 0) {
            I sum[TILES][R];
            clear(sum);
            for (int i = 0; i < Format::MINIMA; ++i) {
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    for (int t = 0; t < TILES; ++t) {
                        sum[t][r] =
                            V::dot_pairs(sum[t][r], minima(t, i), Format::sums(block_of(x[r]), i));
                    }
                }
            }
            for (int t = 0; t < TILES; ++t) {
                for (int r = 0; r < R; ++r) {
                    const auto both = V::mul(d_min(t), V::spread(block_of(x[r]).d));
                    acc[t][r] = V::mul_sub(V::to_float(sum[t][r]), both, acc[t][r]);
                }
            }
        }
    }
};

} // namespace
} // namespace dfl::cpu
