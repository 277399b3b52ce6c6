// Estimates of ggml's CUDA backend on a hypothetical GPU, for memory plans. Source: ggml 0.25.3,
// ggml-cuda (fattn.cu, mmq.cu, ggml-cuda.cu, argsort.cu, top-k.cu).
#pragma once

#include <cstdint>
#include <ggml.h>

namespace dfl::cuda_estimate {

constexpr const char * NAME = "a hypothetical CUDA GPU";

// True if the backend runs a node; false for attention with K/V types that it lacks.
bool runs(const ggml_tensor * node);

// Adds the kernel's float16 copies of K and V to the results of attention nodes with several rows.
// The graph can then only be measured.
void add_attention_copies(ggml_cgraph * graph);

// Returns the estimated memory outside our buffers: the most that a node takes from the backend's
// pool (quantised activations, partial sums, float16 copies, sorting), and cuBLAS's workspace.
uint64_t pool_bytes(ggml_cgraph * graph);

} // namespace dfl::cuda_estimate
