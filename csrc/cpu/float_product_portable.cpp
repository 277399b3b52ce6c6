#include "float_product_tiles.h"
#include "floats_portable.h"
#include "instruction_sets.h"

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
