// Rows picked from a tensor, or put into one.
#pragma once

#include "layers/cpu_ops/graph_context.h"

namespace dfl {

// x: f32 [n, rows], picked: i32 [n_picked] -> [n, n_picked].
ggml_tensor * gather_rows(GraphContext & g, ggml_tensor * x, ggml_tensor * ids);

// Writes x, f32 [n, n_rows], to rows of `to`, f32 [n, ...]; rows: i64 [n_rows].
void scatter_rows(GraphContext & g, ggml_tensor * to, ggml_tensor * x, ggml_tensor * rows);

} // namespace dfl
