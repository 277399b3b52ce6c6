// Softcap, which limits logits to the range (-cap, cap).
#pragma once

#include "layers/cpu_ops/graph_context.h"

namespace dfl {

// Returns cap * tanh(logits / cap), in place on the CPU. logits: f32 [n, n_rows]; cap > 0.
ggml_tensor * capped(GraphContext & g, ggml_tensor * logits, float cap);

} // namespace dfl
