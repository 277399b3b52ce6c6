// 8 floats in AVX2, with the operations of kernels for vectors of any width.
#pragma once

#include "cpu/simd/exp_lanes.h"

#include <algorithm>
#include <cstdint>
#include <immintrin.h>

namespace dfl::cpu {
namespace {

struct Floats256 {
    static constexpr const char * NAME = "avx2";
    static constexpr int T = 8;
    static constexpr int WIDE = 2; // number of vectors that attention multiplies at once
    static constexpr bool HAS_REGISTERS = true; // the vector type is one CPU register
    static constexpr int PRODUCT_ROWS = 3;      // rows of x whose 4 outputs each fit in registers
    using F = __m256;

    static F zero() { return _mm256_setzero_ps(); }
    static F spread(float x) { return _mm256_set1_ps(x); }
    static F load(const float * p) { return _mm256_loadu_ps(p); }
    static void store(float * p, F x) { _mm256_storeu_ps(p, x); }
    static float half(uint16_t x) { return _cvtsh_ss(x); }
    static F halves(const uint16_t * p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    }
    static F brains(const uint16_t * p) { // converts BF16 values to floats
        const __m256i wide =
            _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
    using H = __m128i;
    static H load(const uint16_t * p) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    }
    static void store(uint16_t * p, H x) { _mm_storeu_si128(reinterpret_cast<__m128i *>(p), x); }
    static void store_halves(uint16_t * p, F x) {
        _mm_storeu_si128(reinterpret_cast<__m128i *>(p),
                         _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F divide(F a, F b) { return _mm256_div_ps(a, b); }
    static F max(F a, F b) { return _mm256_max_ps(a, b); }
    static F mul_add(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    // Copies the first (even) or second (odd) lane of each pair to both; or exchanges them
    // (swapped).
    static F even(F x) { return _mm256_moveldup_ps(x); }
    static F odd(F x) { return _mm256_movehdup_ps(x); }
    static F swapped(F x) { return _mm256_permute_ps(x, 0xb1); }
    // Returns a - b in the first lane of each pair, a + b in the second lane.
    static F sub_add(F a, F b) { return _mm256_addsub_ps(a, b); }
    static F round(F x) {
        return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
    static F times_power_of_two(F x, F n) {
        const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
        return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), exponent));
    }
    static F zero_below(F x, float limit, F y) {
        return _mm256_and_ps(_mm256_cmp_ps(x, spread(limit), _CMP_NLT_UQ), y);
    }
    static F exp(F x) { return exp_lanes<Floats256>(x); }
    // Selects a where x < 0, else b.
    static F where_negative(F x, F a, F b) {
        return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, zero(), _CMP_LT_OQ));
    }

    // Returns the largest lane; unspecified if a lane is NaN.
    static float largest(F x) {
        const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
    }
    // Sums the lanes of each of four vectors.
    static void sums(const F (&x)[4], float * to) {
        const F all = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
        _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
    }

    // sums() adds the lanes of a vector as two partial sums. Returns the lane that is term m of
    // partial sum `half` (0 or 1).
    static constexpr int lane_of_half(int half, int m) { return 4 * half + m; }
    static F sum_of_half(const F (&x)[4]) { return add(add(x[0], x[1]), add(x[2], x[3])); }

    static void transpose(F (&r)[8]) {
        F t[8];
        for (int i = 0; i < 8; i += 2) {
            t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
            t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
        }
        for (int i = 0; i < 8; i += 4) {
            r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
            r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
            r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
            r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
        }
        // The 8 x 8 matrix is transposed in 4 x 4 blocks so far: 128-bit lane l of r[4 i + j] has
        // column 4 l + j of rows 4 i to 4 i + 3.
        for (int j = 0; j < 4; ++j) {
            t[j] = _mm256_permute2f128_ps(r[j], r[4 + j], 0x20);
            t[4 + j] = _mm256_permute2f128_ps(r[j], r[4 + j], 0x31);
        }
        std::copy(t, t + 8, r);
    }
    static void transpose(H (&r)[8]) {
        H t[8];
        for (int i = 0; i < 8; i += 2) {
            t[i] = _mm_unpacklo_epi16(r[i], r[i + 1]);
            t[i + 1] = _mm_unpackhi_epi16(r[i], r[i + 1]);
        }
        for (int i = 0; i < 8; i += 4) {
            r[i] = _mm_unpacklo_epi32(t[i], t[i + 2]);
            r[i + 1] = _mm_unpackhi_epi32(t[i], t[i + 2]);
            r[i + 2] = _mm_unpacklo_epi32(t[i + 1], t[i + 3]);
            r[i + 3] = _mm_unpackhi_epi32(t[i + 1], t[i + 3]);
        }
        for (int j = 0; j < 4; ++j) {
            t[2 * j] = _mm_unpacklo_epi64(r[j], r[4 + j]);
            t[2 * j + 1] = _mm_unpackhi_epi64(r[j], r[4 + j]);
        }
        std::copy(t, t + 8, r);
    }
};

} // namespace
} // namespace dfl::cpu
