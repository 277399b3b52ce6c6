#include "cpu/matmul/product_lists.h"

#if defined(__AVX512F__)

#include "cpu/matmul/float_product_tiles.h"
#include "cpu/simd/floats512.h"

namespace dfl::cpu {

namespace {

constexpr PackedProduct LIST[] = {
    float_product<FloatWeights<Floats512, GGML_TYPE_F32>>("f32 avx512"),
    float_product<FloatWeights<Floats512, GGML_TYPE_F16>>("f16 avx512"),
    float_product<FloatWeights<Floats512, GGML_TYPE_BF16>>("bf16 avx512"),
};

} // namespace

PackedProducts avx512_float_products() { return {LIST, sizeof LIST / sizeof LIST[0]}; }

} // namespace dfl::cpu

#else

namespace dfl::cpu {

PackedProducts avx512_float_products() { return {nullptr, 0}; }

} // namespace dfl::cpu

#endif
