// Vectors of 16 outputs in AVX-512 with VNNI.
#pragma once

#include "rows.h"

namespace dfl::cpu {
namespace {

struct Vector512 {
    static constexpr int T = 16;
    static constexpr int MAX_ROWS = 8;
    static constexpr int32_t SIGNED_OFFSET = 128; // signed weights are stored plus this
    using I = __m512i;                            // T int32, or 4 bytes in each place
    using F = __m512;

    static I load(const void * p) { return _mm512_loadu_si512(p); }
    static I spread(int32_t v) { return _mm512_set1_epi32(v); }
    static F to_float(I v) { return _mm512_cvtepi32_ps(v); }
    static F zero() { return _mm512_setzero_ps(); }
    static F spread(float v) { return _mm512_set1_ps(v); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F mul_add(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F halves(const void * p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i *>(p)));
    }
    static void store(float * dst, F v, int n) {
        _mm512_mask_storeu_ps(dst, static_cast<__mmask16>((1u << n) - 1), v);
    }

    // sum[r] += the products of 4 * N inputs. weights(k): 4 inputs of every output, unsigned.
    // x[r] + at: that row's inputs.
    template <int N, int R, class Weights>
    static void dot(I (&sum)[R], Weights weights, const Rows<R> & x, int64_t at) {
#pragma GCC unroll 8
        for (int k = 0; k < N; ++k) {
            const I w = weights(k);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                int32_t four;
                std::memcpy(&four, x[r] + at + 4 * k, 4);
                sum[r] = _mm512_dpbusd_epi32(sum[r], w, _mm512_set1_epi32(four));
            }
        }
    }
    template <int N, int R, class Weights>
    static void dot_signed(I (&sum)[R], Weights weights, const Rows<R> & x, int64_t at) {
        dot<N>(sum, weights, x, at);
    }
};

} // namespace
} // namespace dfl::cpu
