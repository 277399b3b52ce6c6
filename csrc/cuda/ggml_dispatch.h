// Functions that the patched ggml-cuda.cu calls for nodes whose op is GGML_OP_CUSTOM.
#pragma once

#include <ggml-cuda/common.cuh>

// True if a kernel of ours computes the node on a device.
bool dfl_cuda_supports(int device, const ggml_tensor * node);
void dfl_cuda_compute(ggml_backend_cuda_context & ctx, ggml_tensor * node);
