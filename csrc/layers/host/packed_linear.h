// Products with packed weights. What makes the rows of x (packed_rows.h) is part of them, and so is
// a residual that is added.
#pragma once

#include "layers/host/packed_input.h"

#include <vector>

namespace dfl {

// x: f32 [n_in, n_rows] -> [n_out, n_rows].
ggml_tensor * packed_linear(Build & b, const PackedMatrix & weight, ggml_tensor * x);

ggml_tensor * packed_linear(Build & b, const PackedMatrix & weight, const PackedInput & input);

// Several products with the same x as one node, if they take x quantised alike; else empty. Their
// results are columns of one tensor: rows do not follow each other without a gap.
std::vector<ggml_tensor *>
packed_linears(Build & b, const std::vector<const PackedMatrix *> & weights, ggml_tensor * x);

// y + x. y: what was built last, read by nothing yet. It may be changed.
ggml_tensor * add_residual(Build & b, ggml_tensor * y, ggml_tensor * x);

} // namespace dfl
