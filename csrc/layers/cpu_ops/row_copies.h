// Rows picked from a tensor, or put into one.
#pragma once

#include "layers/cpu_ops/build.h"

namespace dfl {

// x: f32 [n, rows], picked: i32 [n_picked] -> [n, n_picked].
ggml_tensor * pick_rows(Build & b, ggml_tensor * x, ggml_tensor * picked);

// Writes x, f32 [n, n_rows], to rows of `to`, f32 [n, ...]; rows: i64 [n_rows].
void put_rows(Build & b, ggml_tensor * to, ggml_tensor * x, ggml_tensor * rows);

} // namespace dfl
