// What an accepted path does to the recurrent layers.
#pragma once

#include "layers/host/build.h"

namespace dfl {

// Advances the committed state of a device's recurrent layers along an accepted path of the last
// VERIFY. path: i32 [n_path, n_layers or more], nodes in order, padded with any; on_path: f32 [1,
// n_path], 0 for padding; conv_rows: i32 [d_conv - 1, n_layers or more], rows of (committed inputs
// ++ traced inputs).
void promote(Build & b, const RecurrentPart & part, ggml_tensor * path, ggml_tensor * on_path,
             ggml_tensor * conv_rows);

} // namespace dfl
