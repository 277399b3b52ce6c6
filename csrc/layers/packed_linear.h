// Products with packed weights: x is quantised once for all of them, then each is one node.
#pragma once

#include "layers/build.h"

namespace dfl {

// x: f32 [n_in, n_rows] -> [n_out, n_rows].
ggml_tensor * packed_linear(Build & b, const PackedMatrix & weight, ggml_tensor * x);

} // namespace dfl
