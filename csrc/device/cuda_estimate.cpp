#include "device/cuda_estimate.h"

#include <algorithm>
#include <initializer_list>

namespace dfl::cuda_estimate {

bool runs(const ggml_tensor * node) {
    if (node->op != GGML_OP_FLASH_ATTN_EXT) {
        return true;
    }
    return std::none_of(node->src + 1, node->src + 3,
                        [](const ggml_tensor * x) { return x->type == GGML_TYPE_IQ4_NL; });
}

void add_attention_copies(ggml_cgraph * graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (node->op != GGML_OP_FLASH_ATTN_EXT || node->src[0]->ne[1] <= 1) {
            continue;
        }
        uint64_t index = 0;
        for (const ggml_tensor * x : {node->src[1], node->src[2]}) {
            index += x->type == GGML_TYPE_F16 ? 0 : ggml_nelements(x) * sizeof(ggml_fp16_t);
        }
        if (index > 0) { // adds the copies' `index` bytes to the result; no node reads them
            node->ne[3] = 2;
            node->nb[3] = index;
        }
    }
}

// Most rows that ggml multiplies without cuBLAS (float weights) or tiled kernels (quantised).
constexpr int64_t MAX_ROWS_WITHOUT_BLAS = 8;
// Bytes of cuBLAS's workspace on Hopper and later GPUs; earlier GPUs have 4 MiB.
constexpr uint64_t blas_workspace = uint64_t(32) << 20;
// Bytes of quantised products' partial sums: 128 x 128 floats per multiprocessor of an H100.
constexpr uint64_t open_tiles = uint64_t(132) * 128 * 128 * sizeof(float);
constexpr uint64_t pool_page = uint64_t(2) << 20;

// Returns bytes of quantised activations: 144 per block of 128 values, rows padded to 512 values.
static uint64_t quantised_product_bytes(const ggml_tensor * x) {
    const int64_t padded = (x->ne[0] + 511) / 512 * 512, n_rows = ggml_nrows(x);
    return n_rows * padded / 128 * 144 + (n_rows > MAX_ROWS_WITHOUT_BLAS ? open_tiles : 0);
}

// Returns bytes of float16 or bfloat16 copies of inputs, and of outputs if weights are float16.
static uint64_t float_product_bytes(const ggml_tensor * node) {
    const int64_t n = node->src[0]->type == GGML_TYPE_F32 ? 0 : ggml_nelements(node->src[1]);
    return 2 * (n + (node->src[0]->type == GGML_TYPE_F16 ? ggml_nelements(node) : 0));
}

// Returns the bytes that a top-k node takes to sort rows: one index for each value if rows have up
// to 1024 values, else three copies of values and indices.
static uint64_t sort_bytes(const ggml_tensor * rows) {
    if (rows->ne[0] <= 1024) {
        return ggml_nbytes(rows);
    }
    constexpr int64_t chunk = 1 << 26; // most bytes of rows that are sorted at once
    return 6 * std::max<int64_t>(rows->nb[1], std::min<int64_t>(chunk, ggml_nbytes(rows)));
}

uint64_t pool_bytes(ggml_cgraph * graph) {
    uint64_t largest = 0, workspace = 0;
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        const bool product = node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID;
        if (product && ggml_is_quantized(node->src[0]->type)) {
            largest = std::max(largest, quantised_product_bytes(node->src[1]));
        } else if (product) {
            largest = std::max(largest, float_product_bytes(node));
            workspace =
                ggml_nrows(node->src[1]) > MAX_ROWS_WITHOUT_BLAS ? blas_workspace : workspace;
        } else if (node->op == GGML_OP_TOP_K) {
            largest = std::max(largest, sort_bytes(node->src[0]));
        }
    }
    return (largest + pool_page - 1) / pool_page * pool_page + workspace;
}

} // namespace dfl::cuda_estimate
