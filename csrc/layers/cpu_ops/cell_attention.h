// Attention over cells, in our own code.
#pragma once

#include "layers/cpu_ops/graph_context.h"

namespace dfl {

// q: f32 [head_dim, n_head, n_rows] -> same, over the cells that the rows see; of a layer that
// KvCache::attends_on_host(). In the basis of the queries: what was rotated is turned back.
ggml_tensor * cell_attention(GraphContext & g, int il, ggml_tensor * q);

} // namespace dfl
