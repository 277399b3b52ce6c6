#include "cpu/matmul/product_lists.h"

#if defined(__AVX2__)

#include "cpu/matmul/float_product_tiles.h"
#include "cpu/simd/floats256.h"

namespace dfl::cpu {

namespace {

constexpr PackedProduct LIST[] = {
    float_product<FloatWeights<Floats256, GGML_TYPE_F32>>("f32 avx2"),
    float_product<FloatWeights<Floats256, GGML_TYPE_F16>>("f16 avx2"),
    float_product<FloatWeights<Floats256, GGML_TYPE_BF16>>("bf16 avx2"),
};

} // namespace

PackedProducts avx2_float_products() { return {LIST, sizeof LIST / sizeof LIST[0]}; }

} // namespace dfl::cpu

#else

namespace dfl::cpu {

PackedProducts avx2_float_products() { return {nullptr, 0}; }

} // namespace dfl::cpu

#endif
