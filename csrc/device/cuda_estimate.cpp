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
        uint64_t copies = 0;
        for (const ggml_tensor * x : {node->src[1], node->src[2]}) {
            copies += x->type == GGML_TYPE_F16 ? 0 : ggml_nelements(x) * sizeof(ggml_fp16_t);
        }
        if (copies > 0) { // no node reads this dimension
            node->ne[3] = 2;
            node->nb[3] = copies;
        }
    }
}

// Activations are quantised in blocks of 128 values and 16 bytes of scales, rows padded to 512.
static uint64_t activation_bytes(const ggml_tensor * x) {
    const int64_t padded = (x->ne[0] + 511) / 512 * 512;
    return ggml_nrows(x) * padded / 128 * 144;
}

// Short rows: indices. Long ones: keys and indices, each before and after sorting and once more
// between the passes.
static uint64_t sort_bytes(const ggml_tensor * rows) {
    if (rows->ne[0] <= 1024) {
        return ggml_nbytes(rows);
    }
    constexpr int64_t chunk = 1 << 26; // bytes of rows that are sorted at once
    return 6 * std::max<int64_t>(rows->nb[1], std::min<int64_t>(chunk, ggml_nbytes(rows)));
}

uint64_t pool_bytes(ggml_cgraph * graph) {
    uint64_t most = 0;
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        const bool product = node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID;
        if (product && node->src[0]->type != GGML_TYPE_F32) {
            const bool quantised = ggml_is_quantized(node->src[0]->type);
            most = std::max<uint64_t>(most, quantised ? activation_bytes(node->src[1])
                                                      : ggml_nelements(node->src[1]) * 2);
        } else if (node->op == GGML_OP_TOP_K) {
            most = std::max(most, sort_bytes(node->src[0]));
        }
    }
    return most;
}

} // namespace dfl::cuda_estimate
