// Mixture of experts: the n_used most probable experts of a row, and optionally a shared expert.
#pragma once

#include "layers/cpu_ops/graph_context.h"

namespace dfl {

// Returns the experts' weighted sum for x [n_embd, n_rows], plus `add` if not NULL. router: rows
// that the choice of experts depends on.
ggml_tensor * mixture_of_experts(GraphContext & g, int il, const Rows & router, const Rows & x,
                                 ggml_tensor * add);

} // namespace dfl
