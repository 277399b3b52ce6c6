// Vectors of 8 outputs in AVX2: what it does the same with and without VNNI.
#pragma once

#include "rows.h"

namespace dfl::cpu {
namespace {

struct Vector256 {
    static constexpr int T = 8;
    using I = __m256i; // T int32, or 4 bytes in each place
    using F = __m256;

    static I load(const void * p) { return _mm256_loadu_si256(static_cast<const I *>(p)); }
    static I spread(int32_t v) { return _mm256_set1_epi32(v); }
    static F to_float(I v) { return _mm256_cvtepi32_ps(v); }
    static F zero() { return _mm256_setzero_ps(); }
    static F spread(float v) { return _mm256_set1_ps(v); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F mul_add(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F halves(const void * p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i *>(p)));
    }
    static void store(float * dst, F v, int n) {
        if (n == T) {
            _mm256_storeu_ps(dst, v);
            return;
        }
        float all[T];
        _mm256_storeu_ps(all, v);
        std::memcpy(dst, all, n * sizeof(float));
    }
    // 4 inputs of a row of x, in every place.
    static I spread_four(const uint8_t * x) {
        int32_t four;
        std::memcpy(&four, x, 4);
        return _mm256_set1_epi32(four);
    }
};

} // namespace
} // namespace dfl::cpu
