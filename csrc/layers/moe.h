// Mixture of experts: softmax over all, the best n_used, renormalised; optionally a shared expert.
#pragma once

#include "layers/cpu_ops/graph_context.h"

namespace dfl {

// x: [n_embd, n_rows] -> same, plus `add` if that is not NULL. router: what the router reads.
ggml_tensor * mixture_of_experts(GraphContext & g, int il, const Rows & router, const Rows & x,
                                 ggml_tensor * add);

} // namespace dfl
