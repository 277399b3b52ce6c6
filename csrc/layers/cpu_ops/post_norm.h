// Post-norm of a sublayer's output: norm, residual sum and scale as one node.
#pragma once

#include "layers/cpu_ops/graph_context.h"

namespace dfl {

// Returns (rms_norm(y) * weight + add) * scale. add, f32 [n, n_rows], and scale, [1], may be NULL.
ggml_tensor * post_normed(GraphContext & g, ggml_tensor * y, ggml_tensor * weight,
                          ggml_tensor * add, ggml_tensor * scale = nullptr);

} // namespace dfl
