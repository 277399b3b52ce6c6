// Attention over visible K/V cells by our own CPU code.
#pragma once

#include "layers/cpu_ops/graph_context.h"

namespace dfl {

// Returns the attention of q, f32 [head_dim, n_head, n_rows], over visible cells, in the shape of
// q. Layer il must attend on the host. If cached values are rotated, the result is rotated back.
ggml_tensor * cell_attention(GraphContext & g, int il, ggml_tensor * q);

} // namespace dfl
