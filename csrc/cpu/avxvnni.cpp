#include "instruction_sets.h"

#if defined(__AVXVNNI__)

#include "q8_0.h"
#include "vector256.h"

namespace dfl::cpu {

namespace {

struct VectorVnni : Vector256 {
    static constexpr int MAX_ROWS = 6;
    static constexpr int32_t SIGNED_OFFSET = 128; // signed weights are stored plus this

    // As Vector512's.
    template <int N, int R, class Weights>
    static void dot(I (&sum)[R], Weights weights, const Rows<R> & x, int64_t at) {
#pragma GCC unroll 8
        for (int k = 0; k < N; ++k) {
            const I w = weights(k);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                sum[r] = _mm256_dpbusd_avx_epi32(sum[r], w, spread_four(x[r] + at + 4 * k));
            }
        }
    }
    template <int N, int R, class Weights>
    static void dot_signed(I (&sum)[R], Weights weights, const Rows<R> & x, int64_t at) {
        dot<N>(sum, weights, x, at);
    }
};

constexpr PackedProduct LIST[] = {
    product<VectorVnni, Q8_0>("q8_0 avxvnni"),
};

} // namespace

PackedProducts avxvnni_products() { return {LIST, sizeof LIST / sizeof LIST[0]}; }

} // namespace dfl::cpu

#else

namespace dfl::cpu {

PackedProducts avxvnni_products() { return {nullptr, 0}; }

} // namespace dfl::cpu

#endif
