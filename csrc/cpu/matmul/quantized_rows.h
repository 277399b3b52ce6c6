// Rows of x quantised for products with quantised weights. Everything has internal linkage: the
// linker must not merge copies for different instruction sets.
#pragma once

#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace dfl::cpu {
namespace {

// 32 values of x as in Q8_0: value = d * q. start: the start of sums over weights stored with an
// offset, as Starts::start_of() returns it.
struct Block32 {
    int8_t q[32];
    float d;
    int32_t start;
};

// 32 values of x as in Q8_1: value = d * q. sum: of the values, to multiply with minima of weights.
struct Block32Sum {
    int8_t q[32];
    float d;
    float sum;
};

// 256 values of x as in Q8_K: value = d * q. starts: of sums over each 16 weights stored with an
// offset, as Starts::start_of() returns them. sums: of each 32 q.
struct Block256 {
    int8_t q[256];
    float d;
    int32_t starts[16];
    int16_t sums[8];
};

// Sums of the first two (low) and of the last two (high) of each 4 values.
struct PairSums {
    int16_t low, high;

    // Returns both sums, low in the lower half: in place of a start, for minima of weights.
    static int32_t start_of(int32_t low, int32_t high, int32_t) {
        return static_cast<int32_t>(static_cast<uint32_t>(high) << 16 | (low & 0xffff));
    }
};
inline PairSums pair_sums_16(const int8_t * q) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(q));
    __m128i sums = _mm_maddubs_epi16(_mm_set1_epi8(1), bytes);
    sums = _mm_add_epi16(sums, _mm_shuffle_epi32(sums, 0x4e));
    sums = _mm_add_epi16(sums, _mm_shuffle_epi32(sums, 0xb1));
    const int32_t both = _mm_cvtsi128_si32(sums);
    return {static_cast<int16_t>(both), static_cast<int16_t>(both >> 16)};
}

inline float half_to_float(uint16_t half) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
}

// Rounds to F16 and back, because ggml stores scales in F16.
inline float through_half(float x) {
    const __m128i half = _mm_cvtps_ph(_mm_set_ss(x), _MM_FROUND_TO_NEAREST_INT);
    return half_to_float(static_cast<uint16_t>(_mm_extract_epi16(half, 0)));
}

// Returns magnitudes as integers, which order NaN last; a maximum of floats would lose NaN.
inline __m256i magnitudes(const float * x) {
    return _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(x)),
                            _mm256_set1_epi32(0x7fffffff));
}

// Returns the largest magnitude of N values; NaN if a value is NaN.
template <int N>
inline float largest_magnitude(const float * x) {
    __m256i all = magnitudes(x);
    for (int i = 8; i < N; i += 8) {
        all = _mm256_max_epi32(all, magnitudes(x + i));
    }
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(m));
}

// Rounds 32 values times scale to integers. Returns the sum, arbitrary if a value is not finite.
inline int64_t quantize_32(const float * x, float scale, int8_t * q) {
    __m256i v[4];
    for (int i = 0; i < 4; ++i) {
        const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), _mm256_set1_ps(scale));
        v[i] = _mm256_cvtps_epi32(scaled);
    }
    const __m256i sum =
        _mm256_add_epi32(_mm256_add_epi32(v[0], v[1]), _mm256_add_epi32(v[2], v[3]));
    __m256i bytes =
        _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(q), bytes);
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    return _mm_cvtsi128_si32(s);
}

// Quantises 32 values to q and returns the sum of q. *d: scale in F32; NaN if a value is NaN.
inline int64_t quantize_block_32(const float * x, int8_t * q, float * d) {
    const float top = largest_magnitude<32>(x);
    *d = top / 127.0f;
    return quantize_32(x, top != 0.0f ? 127.0f / top : 0.0f, q);
}

// Quantises a row as ggml does; offset: added to the stored weights that the row multiplies.
template <class Starts>
inline void quantize_blocks_32(const float * x, int64_t n_in, int32_t offset, void * dst) {
    auto * block = static_cast<Block32 *>(dst);
    for (int64_t i = 0; i < n_in; i += 32, ++block) {
        float d;
        quantize_block_32(x + i, block->q, &d);
        const PairSums first = pair_sums_16(block->q), second = pair_sums_16(block->q + 16);
        block->start = Starts::start_of(first.low + second.low, first.high + second.high, offset);
        block->d = through_half(d);
    }
}

inline void quantize_blocks_32_sum(const float * x, int64_t n_in, void * dst) {
    auto * block = static_cast<Block32Sum *>(dst);
    for (int64_t i = 0; i < n_in; i += 32, ++block) {
        float d;
        const auto sum = static_cast<float>(quantize_block_32(x + i, block->q, &d));
        block->sum = through_half(d * sum);
        block->d = through_half(d);
    }
}

// Returns the first of 256 values with the largest magnitude; NaN if a value is NaN.
inline float first_largest_256(const float * x) {
    const float top = largest_magnitude<256>(x);
    const __m256i wanted = _mm256_set1_epi32(_mm_cvtsi128_si32(_mm_castps_si128(_mm_set_ss(top))));
    for (int i = 0; i < 256; i += 8) {
        const __m256i same = _mm256_cmpeq_epi32(magnitudes(x + i), wanted);
        const int mask = _mm256_movemask_ps(_mm256_castsi256_ps(same));
        if (mask != 0) {
            return x[i + __builtin_ctz(mask)];
        }
    }
    return top;
}

template <class Starts>
inline void quantize_blocks_256(const float * x, int64_t n_in, int32_t offset, void * dst) {
    auto * block = static_cast<Block256 *>(dst);
    for (int64_t i = 0; i < n_in; i += 256, ++block) {
        const float top = first_largest_256(x + i);
        const float scale = top != 0.0f ? -127.0f / top : 0.0f;
        for (int j = 0; j < 8; ++j) {
            const int64_t sum = quantize_32(x + i + 32 * j, scale, block->q + 32 * j);
            block->sums[j] = static_cast<int16_t>(sum);
            for (int k = 2 * j; k < 2 * j + 2; ++k) {
                const PairSums of = pair_sums_16(block->q + 16 * k);
                block->starts[k] = Starts::start_of(of.low, of.high, offset);
            }
        }
        block->d = top != 0.0f ? 1.0f / scale : 0.0f;
    }
}

} // namespace
} // namespace dfl::cpu
