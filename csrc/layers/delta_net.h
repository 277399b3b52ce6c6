// Gated DeltaNet: the linear attention of Qwen3.5.
#pragma once

#include "layers/host/build.h"

namespace dfl {

// x: [n_embd, n_rows] -> same. Reads the committed state and convolution inputs of the batch's
// sequences and writes them back advanced by all rows; a VERIFY writes the trace instead.
// Source: reference forward of transformers' Qwen3_5GatedDeltaNet, with value heads in tiled order.
ggml_tensor * delta_net(Build & b, int il, ggml_tensor * x);

// Rows of one chunk where an APPEND takes the form for trees.
constexpr int64_t PATH_CHUNK = 64;

} // namespace dfl
