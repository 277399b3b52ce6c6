#include "cpu/isa/tile_kernels.h"
#include "cpu/simd/vector256.h"

namespace dfl::cpu {

namespace {

struct VectorVnni : Vector256 {
    static constexpr const char * NAME = "avxvnni";
    static constexpr int MAX_ROWS = 6;
    static constexpr int64_t FETCH_AHEAD = 16384; // distance in bytes of weight prefetches
    static constexpr int32_t SIGNED_OFFSET = 128;

    template <int N, int LARGEST, int R, class Weights>
    static void dot(I (&sum)[R], Weights weights, const Rows<R> & x, int64_t at) {
        for_each<N>([&](auto k) {
            const I w = weights(k);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                sum[r] = _mm256_dpbusd_avx_epi32(sum[r], w, spread_four(x[r] + at + 4 * k));
            }
        });
    }
    template <int N, int R, class Weights>
    static void dot_signed(I (&sum)[R], Weights weights, const Rows<R> & x, int64_t at) {
        dot<N, 255>(sum, weights, x, at);
    }
};

} // namespace

Kernels avxvnni_kernels() { return {{tile_products<VectorVnni>()}}; }

} // namespace dfl::cpu
