// Products with packed weights: x is quantised once for all of them, then each is one node. A norm
// before it is part of the first, a residual added to it part of the second.
#pragma once

#include "layers/build.h"

namespace dfl {

// x: f32 [n_in, n_rows] -> [n_out, n_rows].
ggml_tensor * packed_linear(Build & b, const PackedMatrix & weight, ggml_tensor * x);

// y + x. y: what was built last, read by nothing yet. It may be changed.
ggml_tensor * add_residual(Build & b, ggml_tensor * y, ggml_tensor * x);

} // namespace dfl
