// Vectors of 8 outputs in AVX2: operations shared by the sets with and without VNNI.
#pragma once

#include "cpu/simd/floats256.h"
#include "cpu/simd/rows.h"

#include <cstring>

namespace dfl::cpu {
namespace {

struct Vector256 : Floats256 {
    using I = __m256i;
    using Fetch = FetchToL2;
    using FetchBytes = FetchToL1;

    static I load(const void * p) { return _mm256_loadu_si256(static_cast<const I *>(p)); }
    static I spread(int32_t v) { return _mm256_set1_epi32(v); }
    static F to_float(I v) { return _mm256_cvtepi32_ps(v); }
    using Floats256::spread;
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
    static F mul_sub(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); } // returns c - a * b
    static F unsigned_bytes(const void * p) {
        return to_float(_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i *>(p))));
    }
    static F signed_bytes(const void * p) {
        return to_float(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i *>(p))));
    }

    // Widens 2 * T bytes to 16-bit integers, two in each 32-bit lane.
    static I pairs(const void * p) {
        return _mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i *>(p)));
    }
    // Widens T bytes to 16-bit integers, each twice in a 32-bit lane.
    static I twice(const void * p) {
        const __m128i bytes = _mm_loadl_epi64(static_cast<const __m128i *>(p));
        return _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(bytes, bytes));
    }
    static I dot_pairs(I sum, I pairs, const void * x) {
        return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, spread_four(x)));
    }

    static void store_bytes(void * p, I v) { _mm256_storeu_si256(static_cast<I *>(p), v); }
    static I both(I a, I b) { return _mm256_or_si256(a, b); }
    // Shifts every byte right by N or left by -N. mask must not keep a neighbouring byte's bits.
    template <int N>
    static I bits(I v, uint8_t mask) {
        const I moved =
            N >= 0 ? _mm256_srli_epi16(v, N >= 0 ? N : 0) : _mm256_slli_epi16(v, N >= 0 ? 0 : -N);
        return _mm256_and_si256(moved, _mm256_set1_epi8(static_cast<char>(mask)));
    }

    // Looks up every byte, which must be below 16, in the table.
    static I look_up(const uint8_t * table, I v) {
        const __m128i once = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table));
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(once), v);
    }
    // Returns 2^(e - 128) for T bytes e; e = 0 and 1 give subnormal numbers, as in ggml.
    static F half_powers(const void * p) {
        const I e = _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i *>(p)));
        const I normal = _mm256_slli_epi32(_mm256_sub_epi32(e, spread(1)), 23);
        const I small = _mm256_sllv_epi32(spread(0x00200000), e);
        return _mm256_castsi256_ps(
            _mm256_blendv_epi8(normal, small, _mm256_cmpgt_epi32(spread(2), e)));
    }

    static I spread_four(const void * x) {
        int32_t four;
        std::memcpy(&four, x, 4);
        return _mm256_set1_epi32(four);
    }
};

} // namespace
} // namespace dfl::cpu
