#include "cpu/isa/tile_kernels.h"
#include "cpu/simd/vector256.h"

namespace dfl::cpu {

namespace {

struct VectorAvx2 : Vector256 {
    static constexpr int MAX_ROWS = 4;
    static constexpr int64_t FETCH_AHEAD = 16384; // distance in bytes of weight prefetches
    static constexpr int32_t SIGNED_OFFSET = 0;

    // Adds products of 4 * N inputs to sum[r], like Vector512::dot. AVX2 adds products in 16 bits,
    // which are widened before they overflow.
    template <int N, int LARGEST, int R, class Weights>
    static void dot(I (&sum)[R], Weights weights, const Rows<R> & x, int64_t at) {
        constexpr int FIT = 32767 / (LARGEST * 254);
        static_assert(FIT > 0, "two products overflow 16 bits");
        I pairs[R];
        for_each<N>([&](auto k) {
            constexpr int NTH = decltype(k)::value % FIT;
            const I w = weights(k);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const I two = _mm256_maddubs_epi16(w, spread_four(x[r] + at + 4 * k));
                pairs[r] = NTH == 0 ? two : _mm256_add_epi16(pairs[r], two);
                if constexpr (NTH == FIT - 1 || k == N - 1) {
                    const I fours = _mm256_madd_epi16(pairs[r], _mm256_set1_epi16(1));
                    sum[r] = _mm256_add_epi32(sum[r], fours);
                }
            }
        });
    }

    // Adds products of 4 * N inputs with signed weights to sum[r]. Two products fit in 16 bits only
    // if the unsigned factor is at most 128, so that factor is the weight's magnitude, and x gets
    // the weight's sign.
    template <int N, int R, class Weights>
    static void dot_signed(I (&sum)[R], Weights weights, const Rows<R> & x, int64_t at) {
        for_each<N>([&](auto k) {
            const I w = weights(k), magnitude = _mm256_abs_epi8(w);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const I four = _mm256_sign_epi8(spread_four(x[r] + at + 4 * k), w);
                const I pairs = _mm256_maddubs_epi16(magnitude, four);
                const I fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
                sum[r] = _mm256_add_epi32(sum[r], fours);
            }
        });
    }
};

} // namespace

PackedProducts avx2_products() { return tile_products<VectorAvx2>(); }

} // namespace dfl::cpu
