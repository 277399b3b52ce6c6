// What follows a sublayer that is normed before it is added: norm, sum and scale as one node.
#pragma once

#include "layers/cpu_ops/graph_context.h"

namespace dfl {

// (rms(y) * weight + add) * scale. y, add: f32 [n, n_rows]; weight: [n]; scale: [1]. add and scale
// may be NULL.
ggml_tensor * post_normed(GraphContext & g, ggml_tensor * y, ggml_tensor * weight,
                          ggml_tensor * add, ggml_tensor * scale = nullptr);

} // namespace dfl
