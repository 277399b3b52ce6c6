// Copies of selected rows, out of a tensor or into it.
#pragma once

#include "layers/cpu_ops/graph_context.h"

namespace dfl {

// Returns the rows `ids`, i32 [n_ids], of x, f32 [n, n_rows]: f32 [n, n_ids].
ggml_tensor * gather_rows(GraphContext & g, ggml_tensor * x, ggml_tensor * ids);

// Writes x, f32 [n, n_rows], to the rows `rows`, i64 [n_rows], of the tensor `to`, f32 [n, ...].
void scatter_rows(GraphContext & g, ggml_tensor * to, ggml_tensor * x, ggml_tensor * rows);

} // namespace dfl
