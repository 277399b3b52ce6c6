// Estimates of what ggml's CUDA backend would do on a GPU that is not there to be asked, for plans.
// Source: ggml 0.25.3, ggml-cuda (fattn.cu, mmq.cu, ggml-cuda.cu, argsort.cu, top-k.cu).
#pragma once

#include <cstdint>
#include <ggml.h>

namespace dfl::cuda_estimate {

constexpr const char * NAME = "a hypothetical CUDA GPU";

// Whether it runs a node; false for K/V types its attention does not take.
bool runs(const ggml_tensor * node);

// Lengthens the result of each attention node by the float16 copies that the kernel for more than
// one row makes of other K and V, which lie behind it in the compute buffer. The graph can then be
// measured only, not run.
void add_attention_copies(ggml_cgraph * graph);

// Memory outside any buffer of ours: the most that one node of a graph takes from the backend's own
// pool (quantised activations, open tiles of their products, float16 copies, what sorting whole
// rows of logits needs), and cuBLAS's where it multiplies. An estimate.
uint64_t pool_bytes(ggml_cgraph * graph);

} // namespace dfl::cuda_estimate
