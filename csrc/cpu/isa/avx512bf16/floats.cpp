#include "cpu/isa/kernels.h"
#include "cpu/matmul/float_product_tiles.h"
#include "cpu/simd/floats512.h"

namespace dfl::cpu {

namespace {

// Products of weights and inputs in BF16, rounded as in ggml: twice as many at once as of floats.
struct BrainWeights {
    static constexpr ggml_type TYPE = GGML_TYPE_BF16;
    static constexpr int LANES = 32, MAX_ROWS = Floats512::PRODUCT_ROWS, X_SIZE = 2, SIZE = 2;
    using F = __m512;
    using Weights = __m512i;
    using Inputs = __m512i;

    static F zero() { return Floats512::zero(); }
    static Weights weights(const uint8_t * p) { return _mm512_loadu_si512(p); }
    static Inputs inputs(const uint8_t * p) { return _mm512_loadu_si512(p); }
    static F mul_add(Inputs x, Weights w, F sum) {
        return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(w));
    }
    static void sums(const F (&x)[4], float * to) { Floats512::sums(x, to); }

    static __m256i rounded(const float * x) {
        return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(x)));
    }
    static void take(const float * x, int64_t n, void * to) {
        auto * values = static_cast<uint16_t *>(to);
        const int64_t whole = n / 16 * 16;
        for (int64_t i = 0; i < whole; i += 16) {
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(values + i), rounded(x + i));
        }
        if (whole < n) {
            float rest[16] = {};
            uint16_t last[16];
            std::copy(x + whole, x + n, rest);
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(last), rounded(rest));
            std::copy_n(last, n - whole, values + whole);
        }
    }
};

constexpr PackedProduct PRODUCT = product_of<FloatProduct<BrainWeights>>("avx512bf16");

} // namespace

Kernels avx512bf16_kernels() { return {{{&PRODUCT, 1}}}; }

} // namespace dfl::cpu
