#include "cpu/matmul/float_product_tiles.h"
#include "cpu/matmul/product_lists.h"
#include "cpu/simd/floats_portable.h"

namespace dfl::cpu {

namespace {

constexpr PackedProduct LIST[] = {
    float_product<FloatWeights<FloatsPortable, GGML_TYPE_F32>>("f32 portable"),
    float_product<FloatWeights<FloatsPortable, GGML_TYPE_F16>>("f16 portable"),
    float_product<FloatWeights<FloatsPortable, GGML_TYPE_BF16>>("bf16 portable"),
};

} // namespace

PackedProducts portable_float_products() { return {LIST, sizeof LIST / sizeof LIST[0]}; }

} // namespace dfl::cpu
