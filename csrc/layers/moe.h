// Mixture of experts: softmax over all, the best n_used, renormalised; optionally a shared expert.
#pragma once

#include "layers/host/build.h"

namespace dfl {

// x: [n_embd, n_rows] -> same.
ggml_tensor * mixture_of_experts(Build & b, int il, ggml_tensor * x);

} // namespace dfl
