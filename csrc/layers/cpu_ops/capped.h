// A softcap: what keeps logits between two bounds.
#pragma once

#include "layers/cpu_ops/graph_context.h"

namespace dfl {

// cap * tanh(logits / cap), in place where it is our own code. logits: f32 [n, n_rows], cap > 0.
ggml_tensor * capped(GraphContext & g, ggml_tensor * logits, float cap);

} // namespace dfl
