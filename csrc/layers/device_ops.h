// Graph nodes of recurrent layers that CUDA kernels of our own compute (csrc/cuda), in a CUDA
// module that was built with them.
#pragma once

#include "layers/cpu_ops/graph_context.h"

namespace dfl {

// True if a kernel of ours computes the node on a GPU.
bool is_device_op(const ggml_tensor * node);
// True if a device has the kernels, for verifies of up to max_nodes rows.
bool runs_device_ops(const Backend & backend, const Hparams & hp, int64_t max_nodes);

// Convolves the nodes of a verify, and stores their inputs as updates. u: inputs of the pass,
// [channels, n_rows]. Returns [channels, rows of a lane, n_lanes].
ggml_tensor * convolve_on_device(GraphContext & g, int il, ggml_tensor * u);
// Computes the outputs of a verify's nodes, [d, n_v_heads, rows of a lane, n_lanes], and stores
// their updates. heads: [channels, rows of a lane, n_lanes]. log_decay, beta: [n_v_heads, rows].
ggml_tensor * delta_tree_on_device(GraphContext & g, int il, ggml_tensor * heads,
                                   ggml_tensor * log_decay, ggml_tensor * beta);
// Advances the states of all recurrent layers of a device along accepted paths.
void promote_on_device(GraphContext & g, const RecurrentPart & part, const PromoteInputs & in);

} // namespace dfl
