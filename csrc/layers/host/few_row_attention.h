// Attention of a few rows over cells, in our own code.
#pragma once

#include "layers/host/build.h"

namespace dfl {

// Whether few_row_attention() serves these rows: on the CPU, with K and V in half precision.
bool attends_few_rows(const Build & b, const ggml_tensor * q, const ggml_tensor * k,
                      const ggml_tensor * v);

// q: f32 [head_dim, n_head, n_rows]; k, v: f16 [head_dim, n_kv, n_head_kv]; mask: f16
// [n_kv, n_rows] -> [head_dim, n_head, n_rows].
ggml_tensor * few_row_attention(Build & b, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
                                ggml_tensor * mask, float scale);

} // namespace dfl
