// Vectors of 16 outputs in AVX-512 with VNNI; vector256.h describes the common operations.
#pragma once

#include "cpu/simd/dot_four.h"
#include "cpu/simd/floats512.h"

#include <cstring>

namespace dfl::cpu {
namespace {

struct Bytes512 : Floats512 {
    using I = __m512i;

    static I load(const void * p) { return _mm512_loadu_si512(p); }
    static I spread(int32_t v) { return _mm512_set1_epi32(v); }
    static F to_float(I v) { return _mm512_cvtepi32_ps(v); }
    using Floats512::spread;
    static F halves(const void * p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i *>(p)));
    }
    static void store(float * dst, F v, int n) {
        _mm512_mask_storeu_ps(dst, static_cast<__mmask16>((1u << n) - 1), v);
    }

    static F mul_sub(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
    static F unsigned_bytes(const void * p) {
        return to_float(_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i *>(p))));
    }
    static F signed_bytes(const void * p) {
        return to_float(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i *>(p))));
    }

    static I pairs(const void * p) {
        return _mm512_cvtepu8_epi16(_mm256_loadu_si256(static_cast<const __m256i *>(p)));
    }
    // Widens T bytes to 16-bit integers, each twice in a 32-bit lane.
    static I twice(const void * p) {
        const I wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i *>(p)));
        return _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16));
    }
    static I dot_pairs(I sum, I pairs, const void * x) {
        return _mm512_dpwssd_epi32(sum, pairs, spread_four(x));
    }

    static void store_bytes(void * p, I v) { _mm512_storeu_si512(p, v); }
    static I both(I a, I b) { return _mm512_or_si512(a, b); }
    template <int N>
    static I bits(I v, uint8_t mask) {
        const I moved =
            N >= 0 ? _mm512_srli_epi16(v, N >= 0 ? N : 0) : _mm512_slli_epi16(v, N >= 0 ? 0 : -N);
        return _mm512_and_si512(moved, _mm512_set1_epi8(static_cast<char>(mask)));
    }

    static I look_up(const uint8_t * table, I v) {
        const __m128i once = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table));
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(once), v);
    }
    static F half_powers(const void * p) {
        const I e = _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i *>(p)));
        const I normal = _mm512_slli_epi32(_mm512_sub_epi32(e, spread(1)), 23);
        const I small = _mm512_sllv_epi32(spread(0x00200000), e);
        return _mm512_castsi512_ps(
            _mm512_mask_mov_epi32(normal, _mm512_cmplt_epi32_mask(e, spread(2)), small));
    }

    static I spread_four(const void * x) {
        int32_t four;
        std::memcpy(&four, x, 4);
        return _mm512_set1_epi32(four);
    }
};

struct Vector512 : DotFour<Vector512, Bytes512> {
    static constexpr const char * NAME = "avx512vnni";
    static constexpr int MAX_ROWS_32 = 8, MAX_ROWS_256 = 8;
    static constexpr int UNPACKED_ROWS = 6, UNPACKED_PARTS = 16, MIN_UNPACKED_ROWS = 16;
    using Fetch = FetchToL2;
    using FetchBytes = FetchToL2;

    static I dot_four(I sum, I weights, I x) { return _mm512_dpbusd_epi32(sum, weights, x); }
};

} // namespace
} // namespace dfl::cpu
