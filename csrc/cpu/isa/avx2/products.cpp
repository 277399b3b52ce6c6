#include "cpu/isa/tile_kernels.h"
#include "cpu/simd/vector256.h"

namespace dfl::cpu {

namespace {

// AVX2 multiplies unsigned with signed bytes to 16-bit sums of two products.
struct VectorAvx2 : Vector256 {
    static constexpr int MAX_ROWS_32 = 8, MAX_ROWS_256 = 5;
    static constexpr int UNPACKED_ROWS = 4, UNPACKED_PARTS = 8, MIN_UNPACKED_ROWS = 6;
    static constexpr int32_t SIGNED_OFFSET = 0;

    using Total = I; // of scaled products, exact
    using Scale = I; // each scale twice in a 32-bit lane
    template <bool HAS_SIGN>
    static I scale(const uint8_t * p) {
        if constexpr (HAS_SIGN) {
            const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
            return _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(bytes, bytes));
        }
        return twice(p);
    }
    static F total_to_float(I total) { return to_float(total); }

    // Returns the start of the two 16-bit sums of each lane.
    static int32_t start_of(int32_t low, int32_t high, int32_t offset) {
        return PairSums::start_of(-offset * low, -offset * high, 0);
    }

    // Adds products like those of DotFour::dot() to total, times scale(t): 16-bit factors. Sums of
    // 16 bits are exact though they may wrap on the way, as only their end must be in range.
    template <class Format, int N, int TILES, int R, class Weights, class ScaleOf, class Start>
    static void add_products(I (&total)[TILES][R], Weights weights, ScaleOf scale,
                             const Rows<R> & x, int64_t at, Start start) {
        if constexpr (Format::LARGEST == SIGNED) {
            add_signed<N>(total, weights, scale, x, at);
        } else {
            add_unsigned<Format, N>(total, weights, scale, x, at, start);
        }
    }

    template <class Format, int N, int TILES, int R, class Weights, class ScaleOf, class Start>
    static void add_unsigned(I (&total)[TILES][R], Weights weights, ScaleOf scale,
                             const Rows<R> & x, int64_t at, Start start) {
        constexpr int LARGEST = Format::LARGEST, OFFSET = Format::OFFSET;
        constexpr int REACH = OFFSET > LARGEST - OFFSET ? OFFSET : LARGEST - OFFSET;
        constexpr int FIT = 32767 / (REACH * 254); // groups of 4 inputs whose sums fit in 16 bits
        static_assert(LARGEST * 254 <= 32767, "two products overflow 16 bits");
        static_assert(OFFSET == 0 || FIT >= N, "a sum with an offset must fit in 16 bits");
        I pairs[TILES][R];
        if constexpr (OFFSET != 0) {
            for (int r = 0; r < R; ++r) {
                const I of_row = spread(start(r));
                for (int t = 0; t < TILES; ++t) {
                    pairs[t][r] = of_row;
                }
            }
        }
        for_each<N>([&](auto k) {
            constexpr int NTH = decltype(k)::value % FIT;
            I w[TILES];
            for (int t = 0; t < TILES; ++t) {
                w[t] = weights(t, k);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const I four = spread_four(x[r] + at + 4 * k);
#pragma GCC unroll 2
                for (int t = 0; t < TILES; ++t) {
                    const I two = _mm256_maddubs_epi16(w[t], four);
                    const bool begins = NTH == 0 && OFFSET == 0;
                    pairs[t][r] = begins ? two : _mm256_add_epi16(pairs[t][r], two);
                    if constexpr (NTH == FIT - 1 || k == N - 1) {
                        const I scaled = _mm256_madd_epi16(pairs[t][r], scale(t));
                        total[t][r] = _mm256_add_epi32(total[t][r], scaled);
                    }
                }
            }
        });
    }

    // Two products of signed weights fit in 16 bits only if the unsigned factor is at most 128, so
    // that factor is the weight's magnitude, and x gets the weight's sign.
    template <int N, int TILES, int R, class Weights, class ScaleOf>
    static void add_signed(I (&total)[TILES][R], Weights weights, ScaleOf scale, const Rows<R> & x,
                           int64_t at) {
        for_each<N>([&](auto k) {
            I w[TILES], magnitude[TILES];
            for (int t = 0; t < TILES; ++t) {
                w[t] = weights(t, k);
                magnitude[t] = _mm256_abs_epi8(w[t]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const I four = spread_four(x[r] + at + 4 * k);
#pragma GCC unroll 2
                for (int t = 0; t < TILES; ++t) {
                    const I two = _mm256_maddubs_epi16(magnitude[t], _mm256_sign_epi8(four, w[t]));
                    const I scaled = _mm256_madd_epi16(two, scale(t));
                    total[t][r] = _mm256_add_epi32(total[t][r], scaled);
                }
            }
        });
    }

    template <class Format, int N, int TILES, int R, class Weights, class Start>
    static void dot(I (&sum)[TILES][R], Weights weights, const Rows<R> & x, int64_t at,
                    Start start) {
        clear(sum);
        const I ones = _mm256_set1_epi16(1);
        add_products<Format, N>(sum, weights, [&](int) { return ones; }, x, at, start);
    }
};

} // namespace

PackedProducts avx2_products() { return tile_products<VectorAvx2>(); }

} // namespace dfl::cpu
