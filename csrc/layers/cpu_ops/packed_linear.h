// Products with packed weights, each with its scale, its bias and what is added to it.
#pragma once

#include "layers/cpu_ops/graph_context.h"
#include "layers/cpu_ops/packed_input.h"

#include <vector>

namespace dfl {

// (weight x) * scale + bias + add, [n_out, n_rows]. add: f32 of that shape, or NULL.
ggml_tensor * packed_linear(GraphContext & g, const Linear & l, const PackedInput & input,
                            ggml_tensor * add);
ggml_tensor * packed_linear(GraphContext & g, const Linear & l, const Rows & x, ggml_tensor * add);

// Several products of the same rows as one node; all take them quantised alike. Their results are
// columns of one tensor: rows do not follow each other without a gap.
std::vector<ggml_tensor *>
packed_linears(GraphContext & g, const std::vector<const Linear *> & weights, const Rows & x);

} // namespace dfl
