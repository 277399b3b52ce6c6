#include "cuda/custom_op.h"
#include "cuda/delta_convolve.h"
#include "cuda/delta_promote.h"
#include "cuda/delta_tree.h"
#include "cuda/ggml_dispatch.h"
#include "cuda/math.cuh"

#include <cmath>

using namespace dfl::cuda;

namespace {

template <class T>
T * data(const ggml_tensor * tensor) {
    return tensor != nullptr ? static_cast<T *>(tensor->data) : nullptr;
}

// Returns the distance of two rows (of two matrices for dimension 2) in floats.
int64_t stride(const ggml_tensor * tensor, int dimension = 1) {
    return static_cast<int64_t>(tensor->nb[dimension] / sizeof(float));
}

DeltaConvolution convolution(const ggml_tensor * node) {
    using namespace convolve_source;
    const auto * src = node->src;
    DeltaConvolution work = {};
    work.committed = data<float>(src[COMMITTED]);
    work.u = data<float>(src[U]);
    work.u_row = stride(src[U]);
    work.kernel = data<float>(src[KERNEL]);
    work.inputs = data<int32_t>(src[INPUTS]);
    work.taps = data<int32_t>(src[TAPS]);
    work.updates = data<float>(src[UPDATES]);
    work.update_rows = data<int64_t>(src[UPDATE_ROWS]);
    work.out = data<float>(node);
    work.channels = static_cast<int>(node->ne[0]);
    work.n_committed = static_cast<int>(ggml_nelements(src[COMMITTED]) / work.channels);
    work.n_rows = static_cast<int>(node->ne[1]);
    work.n_sequences = static_cast<int>(node->ne[2]);
    return work;
}

DeltaTree tree(const ggml_tensor * node) {
    using namespace tree_source;
    const CustomOpParams params = custom_op_params(node);
    const auto * src = node->src;
    const ggml_tensor * heads = src[HEADS];
    DeltaTree work = {};
    work.n_k = params.n_k_heads;
    work.n_v = static_cast<int>(node->ne[1]);
    work.n_rows = static_cast<int>(node->ne[2]);
    work.n_sequences = static_cast<int>(node->ne[3]);
    work.state = data<float>(src[STATE]);
    work.state_slot = stride(src[STATE]);
    work.slots = data<int32_t>(src[SLOTS]);
    work.q = data<float>(heads);
    work.k = work.q + static_cast<int64_t>(HEAD_SIZE) * work.n_k;
    work.v = work.k + static_cast<int64_t>(HEAD_SIZE) * work.n_k;
    work.q_row = work.k_row = work.v_row = stride(heads);
    work.g = data<float>(src[LOG_DECAY]);
    work.beta = data<float>(src[BETA]);
    work.gate_row = stride(src[BETA]);
    work.parents = data<int32_t>(src[PARENTS]);
    work.counts = data<int32_t>(src[COUNTS]);
    work.out = data<float>(node);
    work.updates = data<float>(src[UPDATES]);
    work.update_row = stride(src[UPDATES]);
    work.update_rows = data<int64_t>(src[UPDATE_ROWS]);
    work.eps = params.eps;
    work.q_scale = 1.0f / std::sqrt(static_cast<float>(HEAD_SIZE));
    return work;
}

DeltaPromotion promotion(const ggml_tensor * node) {
    using namespace promote_source;
    const auto * src = node->src;
    DeltaPromotion work = {};
    work.n_k = custom_op_params(node).n_k_heads;
    work.n_v = static_cast<int>(src[STATE]->ne[0] / (HEAD_SIZE * HEAD_SIZE));
    work.n_layers = static_cast<int>(src[STATE]->ne[2]);
    work.n_sequences = static_cast<int>(src[COUNTS]->ne[0]);
    work.max_path = static_cast<int>(src[PATH]->ne[0] / work.n_sequences);
    work.state = data<float>(src[STATE]);
    work.state_slot = stride(src[STATE]);
    work.state_layer = stride(src[STATE], 2);
    work.updates = data<float>(src[UPDATES]);
    work.update_row = stride(src[UPDATES]);
    work.update_layer = stride(src[UPDATES], 2);
    work.path = data<int32_t>(src[PATH]);
    work.counts = data<int32_t>(src[COUNTS]);
    work.slots = data<int32_t>(src[SLOTS]);
    work.conv = data<float>(src[CONV]);
    work.conv_slot = stride(src[CONV]);
    work.conv_layer = stride(src[CONV], 2);
    work.conv_updates = data<float>(src[CONV_UPDATES]);
    work.conv_update_layer = stride(src[CONV_UPDATES], 2);
    work.conv_rows = data<int32_t>(src[CONV_ROWS]);
    work.channels = static_cast<int>(src[CONV_UPDATES]->ne[0]);
    work.n_inputs = static_cast<int>(src[CONV]->ne[0] / work.channels);
    return work;
}

// True if the tensor's rows begin at multiples of 16 bytes, in which kernels read them.
bool has_aligned_rows(const ggml_tensor * tensor) { return tensor->nb[1] % sizeof(float4) == 0; }

bool has_launch(int device, const DeltaTree & work) {
    const auto & gpu = ggml_cuda_info().devices[device];
    return choose_launch(work, gpu.nsm, gpu.smpbo).slices > 0;
}

} // namespace

bool dfl_cuda_supports(int device, const ggml_tensor * node) {
    switch (custom_op_params(node).op) {
    case CustomOp::DELTA_CONVOLVE:
        return node->src[convolve_source::KERNEL]->ne[0] == N_TAPS;
    case CustomOp::DELTA_TREE:
        return node->ne[0] == HEAD_SIZE && node->ne[2] <= MAX_TREE_NODES &&
               has_aligned_rows(node->src[tree_source::UPDATES]) && has_launch(device, tree(node));
    case CustomOp::DELTA_PROMOTE:
        return true;
    case CustomOp::NONE:
        break;
    }
    return false;
}

void dfl_cuda_compute(ggml_backend_cuda_context & ctx, ggml_tensor * node) {
    const auto & gpu = ggml_cuda_info().devices[ctx.device];
    switch (custom_op_params(node).op) {
    case CustomOp::DELTA_CONVOLVE:
        CUDA_CHECK(delta_convolve(convolution(node), ctx.stream()));
        break;
    case CustomOp::DELTA_TREE: {
        const DeltaTree work = tree(node);
        CUDA_CHECK(delta_tree(work, choose_launch(work, gpu.nsm, gpu.smpbo), ctx.stream()));
        break;
    }
    case CustomOp::DELTA_PROMOTE:
        CUDA_CHECK(delta_promote(promotion(node), ctx.stream()));
        break;
    case CustomOp::NONE:
        GGML_ABORT("custom nodes of the CPU cannot run on a GPU");
    }
}
