// Graph nodes that our CUDA kernels compute: nodes of type GGML_OP_CUSTOM with a tag behind ggml's
// own parameters. The engine makes them, the CUDA module (ggml_dispatch.cu) finds them by the tag.
#pragma once

#include <cstdint>
#include <cstring>
#include <ggml.h>

namespace dfl::cuda {

enum class CustomOp : int32_t {
    NONE = 0,
    DELTA_CONVOLVE = 0x0df10001,
    DELTA_TREE = 0x0df10002,
    DELTA_PROMOTE = 0x0df10003,
};

struct CustomOpParams {
    CustomOp op = CustomOp::NONE;
    int32_t n_k_heads = 0;
    float eps = 0.0f;
};

// Bytes of op_params that ggml uses in custom nodes: a function, a number of tasks, a pointer.
constexpr size_t CUSTOM_OP_OFFSET = 24;

inline CustomOpParams custom_op_params(const ggml_tensor * node) {
    CustomOpParams params;
    if (node->op == GGML_OP_CUSTOM) {
        std::memcpy(&params, reinterpret_cast<const char *>(node->op_params) + CUSTOM_OP_OFFSET,
                    sizeof(params));
    }
    return params;
}

// Indices of the sources of each operation. Optional sources come last.
namespace convolve_source {
enum { COMMITTED, U, KERNEL, INPUTS, TAPS, UPDATES, UPDATE_ROWS };
}
namespace tree_source {
enum { STATE, HEADS, LOG_DECAY, BETA, PARENTS, COUNTS, UPDATES, UPDATE_ROWS, SLOTS };
}
namespace promote_source {
enum { STATE, UPDATES, PATH, COUNTS, CONV, CONV_UPDATES, CONV_ROWS, SLOTS };
}

} // namespace dfl::cuda
