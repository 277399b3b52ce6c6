// Gated DeltaNet: the linear attention of Qwen3.5.
#pragma once

#include "layers/host/build.h"

namespace dfl {

// x: [n_embd, n_rows] -> same, plus `add` if that is not NULL. Reads the committed state and
// convolution inputs of the batch's sequences and writes them back advanced by their rows; those of
// a verify are written to the trace instead. Source: reference forward of transformers'
// Qwen3_5GatedDeltaNet, with value heads in tiled order.
ggml_tensor * delta_net(Build & b, int il, const Rows & x, ggml_tensor * add);

// Advances the committed state of a device's recurrent layers along an accepted path, of the
// sequence of shape.recurrent. path: i32 [n_path, n_layers or more], rows of the trace in order,
// padded with any; on_path: f32 [1, n_path], 0 for padding; conv_rows: i32 [d_conv - 1, n_layers or
// more], rows of the convolution's trace.
void promote(Build & b, const RecurrentPart & part, ggml_tensor * path, ggml_tensor * on_path,
             ggml_tensor * conv_rows);

// Rows of one chunk where an APPEND takes the form for trees.
constexpr int64_t PATH_CHUNK = 64;

} // namespace dfl
