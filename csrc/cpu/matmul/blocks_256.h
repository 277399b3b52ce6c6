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
    static constexpr int BLOCK = 256, T = V::T, MAX_ROWS = V::MAX_ROWS;
    static constexpr int UNFETCHED_ROWS = 2;
    static constexpr int SCALE_BYTES = PARTS * T;
    static constexpr bool MINIMA = false;

    static size_t tile_size(int64_t n_in) { return n_in / 256 * Format::TILE_BLOCK; }

    static void pack_row(const uint8_t * row, int64_t n_in, int lane, uint8_t * tile) {
        for (int64_t b = 0; b < n_in / 256; ++b) {
            Format::pack_block(row + b * Format::ROW_BLOCK, lane, tile + b * Format::TILE_BLOCK);
        }
    }

    static size_t quantized_row_size(int64_t n_in) { return n_in / 256 * sizeof(Block256); }
    static void quantize_row(const float * x, int64_t n_in, void * dst) {
        quantize_blocks_256(x, n_in, dst);
    }

    // Reads all scales of a block first: going back would stop the hardware prefetcher.
    static void read_scales(const uint8_t * block, uint8_t * scales) {
        for (int i = 0; i < PARTS * T; i += 4 * T) {
            V::store_bytes(scales + i, V::load(block + i));
        }
    }

    // Adds the minimum of a block's part I. This default, for formats without minima, adds nothing.
    template <int I>
    static F add_minimum(F minima, const uint8_t *, const Block256 &) {
        return minima;
    }

    // Adds products of a block's part I with input row r to total[r], in units of the block's
    // scale.
    template <int I, int R>
    static void add_part(F (&total)[R], F (&minima)[R], const uint8_t * block,
                         const uint8_t * scales, const Rows<R> & x) {
        constexpr int SHARE = Format::TILE_BLOCK / PARTS;
        prefetch<SHARE>(block + I * SHARE, x);
        typename V::I sum[R];
        for (int r = 0; r < R; ++r) {
            sum[r] = V::spread(Format::template start<I>(block_of(x[r])));
        }
        Format::template dot<I>(sum, block, x);
        const auto scale =
            Format::MINIMA ? V::unsigned_bytes(scales + I * T) : V::signed_bytes(scales + I * T);
        for (int r = 0; r < R; ++r) {
            total[r] = V::mul_add(V::to_float(sum[r]), scale, total[r]);
            minima[r] = Format::template add_minimum<I>(minima[r], scales, block_of(x[r]));
        }
    }

    template <int R, int... I>
    static void add_parts(F (&total)[R], F (&minima)[R], const uint8_t * block,
                          const uint8_t * scales, const Rows<R> & x,
                          std::integer_sequence<int, I...>) {
        (add_part<I>(total, minima, block, scales, x), ...);
    }

    template <int R>
    static void multiply(const uint8_t * tile, int64_t n_in, Rows<R> x, F (&acc)[R]) {
        for (int64_t b = 0; b < n_in / 256; ++b) {
            uint8_t scales[Format::SCALE_BYTES];
            Format::read_scales(tile, scales);
            F total[R], minima[R];
            for (int r = 0; r < R; ++r) {
                total[r] = minima[r] = V::zero();
            }
            add_parts<R>(total, minima, tile, scales, x, std::make_integer_sequence<int, PARTS>());
            const auto d = V::halves(tile + Format::HALVES_AT);
            for (int r = 0; r < R; ++r) {
                const Block256 & of_x = block_of(x[r]);
                acc[r] = V::mul_add(total[r], V::mul(d, V::spread(of_x.d)), acc[r]);
                if constexpr (Format::MINIMA) {
                    const auto d_min = V::halves(tile + Format::HALVES_AT + 2 * T);
                    acc[r] = Format::take_minima(acc[r], minima[r], d_min, scales, of_x);
                }
            }
            tile += Format::TILE_BLOCK;
            x.advance(sizeof(Block256));
        }
    }

  private:
    static const Block256 & block_of(const uint8_t * x) {
        return *reinterpret_cast<const Block256 *>(x);
    }
};

} // namespace
} // namespace dfl::cpu
