// Products with packed weights, including scale, bias and an added term.
#pragma once

#include "layers/cpu_ops/graph_context.h"
#include "layers/cpu_ops/packed_input.h"

#include <vector>

namespace dfl {

// Returns (weight x) * scale + bias + add, f32 [n_out, n_rows]; add may be NULL.
ggml_tensor * packed_linear(GraphContext & g, const Linear & l, const PackedInput & input,
                            ggml_tensor * add);
ggml_tensor * packed_linear(GraphContext & g, const Linear & l, const Rows & x, ggml_tensor * add);

// Multiplies several weights with the same rows in one node. All weights must take rows in the same
// quantised form. The results are columns of one tensor, so their rows are not contiguous.
std::vector<ggml_tensor *>
packed_linears(GraphContext & g, const std::vector<const Linear *> & weights, const Rows & x);

} // namespace dfl
