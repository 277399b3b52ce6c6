// Q2_K and Q3_K: 256 weights of 2 or 3 bits in sixteenths. Q2_K has a scale and a minimum of 4 bits
// for each, Q3_K a scale of 6 bits less 32, and weights less 4. A block of a tile is the
// sixteenths' scales as bytes, [16][T], the lower two bits as ggml keeps four of them in a byte,
// [16][T][4], with Q3_K's upper bits, [8][T][4], before each of the first eight, the scale [T], for
// Q2_K that of the minima [T], and what fills a vector.
#pragma once

#include "cpu/matmul/tiles.h"

namespace dfl::cpu {
namespace {

template <class V, bool THREE>
struct Q23K {
    using Vector = V;
    static constexpr ggml_type TYPE = THREE ? GGML_TYPE_Q3_K : GGML_TYPE_Q2_K;
    static constexpr int BLOCK = 256, T = V::T, MAX_ROWS = V::MAX_ROWS;
    static constexpr int UNFETCHED_ROWS = 2;
    static constexpr int HALVES = THREE ? 1 : 2, HIGH = THREE ? 8 : 0;
    static constexpr int ROW_BLOCK = THREE ? 110 : 84;
    static constexpr int FOURS_AT = 16 * T, HALVES_AT = FOURS_AT + 4 * (HIGH + 16) * T;
    static constexpr int TILE_BLOCK = HALVES_AT + 4 * T;
    // Places in a row's block.
    static constexpr int ROW_SCALES = THREE ? 96 : 0, ROW_HALVES = THREE ? 108 : 80;
    static constexpr int ROW_LOW = THREE ? 32 : 16;

    static constexpr int high_at(int i) { return FOURS_AT + 4 * T * (2 * i); }
    static constexpr int low_at(int i) {
        return FOURS_AT + 4 * T * (i < HIGH ? 2 * i + 1 : HIGH + i);
    }

    static size_t tile_size(int64_t n_in) { return n_in / 256 * TILE_BLOCK; }

    // Of Q3_K's 12 bytes the first 8 have the lower 4 bits of two scales each, the last 4 the upper
    // 2 of four.
    static uint8_t scale_of(const uint8_t * row, int i) {
        if constexpr (THREE) {
            const int low = row[i % 8] >> i / 8 * 4 & 15, high = row[8 + i % 4] >> i / 4 * 2 & 3;
            return static_cast<uint8_t>((low | high << 4) - 32);
        } else {
            return row[i];
        }
    }

    static void pack_row(const uint8_t * row, int64_t n_in, int lane, uint8_t * tile) {
        for (int64_t b = 0; b < n_in / 256; ++b, row += ROW_BLOCK, tile += TILE_BLOCK) {
            for (int i = 0; i < HALVES; ++i) {
                std::memcpy(tile + HALVES_AT + 2 * (i * T + lane), row + ROW_HALVES + 2 * i, 2);
            }
            for (int i = 0; i < 16; ++i) {
                tile[i * T + lane] = scale_of(row + ROW_SCALES, i);
            }
            for (int i = 0; i < HIGH; ++i) {
                std::memcpy(tile + high_at(i) + 4 * lane, row + 4 * i, 4);
            }
            for (int i = 0; i < 16; ++i) {
                std::memcpy(tile + low_at(i) + 4 * lane, row + ROW_LOW + 4 * i, 4);
            }
        }
    }

    static size_t quantized_row_size(int64_t n_in) { return n_in / 256 * sizeof(Block256); }
    static void quantize_row(const float * x, int64_t n_in, void * dst) {
        quantize_blocks_256(x, n_in, dst);
    }

    // 4 inputs of the sixteenth I, from 4 * k on. Of 128 inputs ggml keeps each fourth of 32 in two
    // bits of 32 bytes.
    template <int I>
    static typename V::I weights(const uint8_t * block, int k) {
        constexpr int HALF = I / 8, FOURTH = I / 2 % 4, SIDE = I % 2;
        const auto low =
            V::template bits<2 * FOURTH>(V::load(block + low_at(HALF * 8 + SIDE * 4 + k)), 3);
        if constexpr (THREE) {
            const auto high = V::load(block + high_at(SIDE * 4 + k));
            return V::both(low, V::template bits<HALF * 4 + FOURTH - 2>(high, 4));
        }
        return low;
    }

    // Sums of x's sixteenths as Block256 has them: times this.
    static constexpr int32_t BIASES = -32;

    // total[r] += what the sixteenth I adds in units of the block's scale, and minima[r] what its
    // minimum takes in units of theirs, times BIASES. All are whole numbers that floats hold.
    template <int I, int R>
    static void add_sixteenth(typename V::F (&total)[R], typename V::F (&minima)[R],
                              const uint8_t * block, const uint8_t * scales, const uint8_t * mins,
                              const Rows<R> & x) {
        prefetch<TILE_BLOCK / 16>(block + I * (TILE_BLOCK / 16), x);
        typename V::I sum[R];
        for (int r = 0; r < R; ++r) {
            const int32_t bias = reinterpret_cast<const Block256 *>(x[r])->biases[I];
            sum[r] = V::spread(THREE ? bias / (BIASES / -4) : 0);
        }
        V::template dot<4, THREE ? 7 : 3>(
            sum, [&](int k) { return weights<I>(block, k); }, x, 16 * I);
        const auto scale =
            THREE ? V::signed_bytes(scales + I * T) : V::unsigned_bytes(scales + I * T);
        for (int r = 0; r < R; ++r) {
            total[r] = V::mul_add(V::to_float(sum[r]), scale, total[r]);
            if constexpr (!THREE) {
                const int32_t bias = reinterpret_cast<const Block256 *>(x[r])->biases[I];
                minima[r] = V::mul_add(V::spread(static_cast<float>(bias)),
                                       V::unsigned_bytes(mins + I * T), minima[r]);
            }
        }
    }

    template <int R, int... I>
    static void add_sixteenths(typename V::F (&total)[R], typename V::F (&minima)[R],
                               const uint8_t * block, const uint8_t * scales, const uint8_t * mins,
                               const Rows<R> & x, std::integer_sequence<int, I...>) {
        (add_sixteenth<I>(total, minima, block, scales, mins, x), ...);
    }

    template <int R>
    static void multiply(const uint8_t * tile, int64_t n_in, Rows<R> x, typename V::F (&acc)[R]) {
        for (int64_t b = 0; b < n_in / 256; ++b) {
            // All at once: the hardware's fetches do not follow loads that go back.
            uint8_t scales[16 * T], mins[16 * T];
            for (int i = 0; i < 16 * T; i += 4 * T) {
                const auto both = V::load(tile + i);
                V::store_bytes(scales + i, THREE ? both : V::template bits<0>(both, 15));
                V::store_bytes(mins + i, V::template bits<4>(both, 15));
            }
            typename V::F total[R], minima[R];
            for (int r = 0; r < R; ++r) {
                total[r] = minima[r] = V::zero();
            }
            add_sixteenths<R>(total, minima, tile, scales, mins, x,
                              std::make_integer_sequence<int, 16>());
            const auto d = V::halves(tile + HALVES_AT);
            for (int r = 0; r < R; ++r) {
                const float d_x = reinterpret_cast<const Block256 *>(x[r])->d;
                acc[r] = V::mul_add(total[r], V::mul(d, V::spread(d_x)), acc[r]);
                if constexpr (!THREE) {
                    const auto d_min = V::halves(tile + HALVES_AT + 2 * T);
                    acc[r] = V::mul_add(minima[r], V::mul(d_min, V::spread(d_x / -BIASES)), acc[r]);
                }
            }
            tile += TILE_BLOCK;
            x.advance(sizeof(Block256));
        }
    }
};

template <class V>
using Q2_K = Q23K<V, false>;
template <class V>
using Q3_K = Q23K<V, true>;

} // namespace
} // namespace dfl::cpu
