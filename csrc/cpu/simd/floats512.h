// 16 floats in AVX-512, with the operations that floats256.h describes.
#pragma once

#include "cpu/simd/exp_lanes.h"

#include <algorithm>
#include <cstdint>
#include <immintrin.h>

namespace dfl::cpu {
namespace {

struct Floats512 {
    static constexpr const char * NAME = "avx512";
    static constexpr int T = 16;
    static constexpr int WIDE = 4;
    static constexpr bool HAS_REGISTERS = true;
    static constexpr int PRODUCT_ROWS = 6;
    using F = __m512;

    static F zero() { return _mm512_setzero_ps(); }
    static F spread(float x) { return _mm512_set1_ps(x); }
    static F load(const float * p) { return _mm512_loadu_ps(p); }
    static void store(float * p, F x) { _mm512_storeu_ps(p, x); }
    static float half(uint16_t x) { return _cvtsh_ss(x); }
    static F halves(const uint16_t * p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    }
    static F brains(const uint16_t * p) {
        const __m512i wide =
            _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
    using H = __m256i;
    static H load(const uint16_t * p) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    }
    static void store(uint16_t * p, H x) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), x); }
    static void store_halves(uint16_t * p, F x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(p),
                            _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F divide(F a, F b) { return _mm512_div_ps(a, b); }
    static F max(F a, F b) { return _mm512_max_ps(a, b); }
    static F mul_add(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F even(F x) { return _mm512_moveldup_ps(x); }
    static F odd(F x) { return _mm512_movehdup_ps(x); }
    static F swapped(F x) { return _mm512_permute_ps(x, 0xb1); }
    static F sub_add(F a, F b) { return _mm512_mask_sub_ps(add(a, b), 0x5555, a, b); }
    static F round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }
    static F times_power_of_two(F x, F n) { return _mm512_scalef_ps(x, n); }
    static F zero_below(F x, float limit, F y) {
        return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, spread(limit), _CMP_NLT_UQ), y);
    }
    static F exp(F x) { return exp_lanes<Floats512>(x); }
    static F where_negative(F x, F a, F b) {
        return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, zero(), _CMP_LT_OQ), b, a);
    }
    static float largest(F x) { return _mm512_reduce_max_ps(x); }
    static void sums(const F (&x)[4], float * to) {
        const __m256 low = _mm256_hadd_ps(folded(x[0]), folded(x[1]));
        const __m256 high = _mm256_hadd_ps(folded(x[2]), folded(x[3]));
        const __m256 all = _mm256_hadd_ps(low, high);
        _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
    }

    static __m256 folded(F x) {
        const __m256d upper = _mm512_extractf64x4_pd(_mm512_castps_pd(x), 1);
        return _mm256_add_ps(_mm512_castps512_ps256(x), _mm256_castpd_ps(upper));
    }

    static constexpr int lane_of_half(int half, int m) {
        return m < 4 ? 4 * half + m : 8 + 4 * half + m - 4;
    }
    static F sum_of_half(const F (&x)[8]) {
        const F y[4] = {add(x[0], x[4]), add(x[1], x[5]), add(x[2], x[6]), add(x[3], x[7])};
        return add(add(y[0], y[1]), add(y[2], y[3]));
    }

    static void transpose(F (&r)[16]) {
        F t[16];
        for (int i = 0; i < 16; i += 2) {
            t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
            t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
        }
        const auto low = [](F a, F b) {
            return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
        };
        const auto high = [](F a, F b) {
            return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
        };
        for (int i = 0; i < 16; i += 4) {
            r[i] = low(t[i], t[i + 2]);
            r[i + 1] = high(t[i], t[i + 2]);
            r[i + 2] = low(t[i + 1], t[i + 3]);
            r[i + 3] = high(t[i + 1], t[i + 3]);
        }
        for (int j = 0; j < 4; ++j) {
            const F even0 = _mm512_shuffle_f32x4(r[j], r[4 + j], 0x88);
            const F even1 = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0x88);
            const F odd0 = _mm512_shuffle_f32x4(r[j], r[4 + j], 0xdd);
            const F odd1 = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0xdd);
            t[j] = _mm512_shuffle_f32x4(even0, even1, 0x88);
            t[8 + j] = _mm512_shuffle_f32x4(even0, even1, 0xdd);
            t[4 + j] = _mm512_shuffle_f32x4(odd0, odd1, 0x88);
            t[12 + j] = _mm512_shuffle_f32x4(odd0, odd1, 0xdd);
        }
        std::copy(t, t + 16, r);
    }
    static void transpose(H (&r)[16]) {
        H t[16];
        for (int i = 0; i < 16; i += 2) {
            t[i] = _mm256_unpacklo_epi16(r[i], r[i + 1]);
            t[i + 1] = _mm256_unpackhi_epi16(r[i], r[i + 1]);
        }
        for (int i = 0; i < 16; i += 4) {
            r[i] = _mm256_unpacklo_epi32(t[i], t[i + 2]);
            r[i + 1] = _mm256_unpackhi_epi32(t[i], t[i + 2]);
            r[i + 2] = _mm256_unpacklo_epi32(t[i + 1], t[i + 3]);
            r[i + 3] = _mm256_unpackhi_epi32(t[i + 1], t[i + 3]);
        }
        // The 16 x 16 matrix is transposed in 8 x 8 blocks in t: 128-bit lane l of t[8 i + j] has
        // column 8 l + j of rows 8 i to 8 i + 7.
        for (int i = 0; i < 16; i += 8) {
            for (int j = 0; j < 4; ++j) {
                t[i + 2 * j] = _mm256_unpacklo_epi64(r[i + j], r[i + 4 + j]);
                t[i + 2 * j + 1] = _mm256_unpackhi_epi64(r[i + j], r[i + 4 + j]);
            }
        }
        for (int j = 0; j < 8; ++j) {
            r[j] = _mm256_permute2x128_si256(t[j], t[8 + j], 0x20);
            r[8 + j] = _mm256_permute2x128_si256(t[j], t[8 + j], 0x31);
        }
    }
};

} // namespace
} // namespace dfl::cpu
