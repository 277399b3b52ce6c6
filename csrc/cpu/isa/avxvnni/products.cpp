#include "cpu/matmul/product_lists.h"

#if defined(__AVXVNNI__)

#include "cpu/matmul/iq4_nl.h"
#include "cpu/matmul/iq4_xs.h"
#include "cpu/matmul/q2_k.h"
#include "cpu/matmul/q4_0.h"
#include "cpu/matmul/q4_k.h"
#include "cpu/matmul/q6_k.h"
#include "cpu/matmul/q8_0.h"
#include "cpu/simd/vector256.h"

namespace dfl::cpu {

namespace {

struct VectorVnni : Vector256 {
    static constexpr int MAX_ROWS = 6;
    static constexpr int32_t SIGNED_OFFSET = 128; // signed weights are stored plus this

    // As Vector512's.
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

constexpr PackedProduct LIST[] = {
    product<Blocks32<VectorVnni, Q4_0>>("q4_0 avxvnni"),
    product<Blocks32<VectorVnni, Q4_1>>("q4_1 avxvnni"),
    product<Blocks32<VectorVnni, Q5_0>>("q5_0 avxvnni"),
    product<Blocks32<VectorVnni, Q5_1>>("q5_1 avxvnni"),
    product<Blocks32<VectorVnni, Q8_0>>("q8_0 avxvnni"),
    product<Blocks32<VectorVnni, IQ4_NL>>("iq4_nl avxvnni"),
    product<Blocks32<VectorVnni, MXFP4>>("mxfp4 avxvnni"),
    product<Q2_K<VectorVnni>>("q2_k avxvnni"),
    product<Q3_K<VectorVnni>>("q3_k avxvnni"),
    product<Q4_K<VectorVnni>>("q4_k avxvnni"),
    product<Q5_K<VectorVnni>>("q5_k avxvnni"),
    product<Q6_K<VectorVnni>>("q6_k avxvnni"),
    product<IQ4_XS<VectorVnni>>("iq4_xs avxvnni"),
};

} // namespace

PackedProducts avxvnni_products() { return {LIST, sizeof LIST / sizeof LIST[0]}; }

} // namespace dfl::cpu

#else

namespace dfl::cpu {

PackedProducts avxvnni_products() { return {nullptr, 0}; }

} // namespace dfl::cpu

#endif
