// A mixture of experts with packed weights: rows are grouped by expert, so that each weight is read
// once for all its rows. What a row gets does not depend on the others: its experts are summed in
// the order of their numbers.
#pragma once

#include "layers/cpu_ops/graph_context.h"

namespace dfl {

// logits: f32 [n_expert, n_rows]. Chooses each row's n_used best and weighs them by the softmax
// over these, which is that over all, renormalised.
ggml_tensor * route(GraphContext & g, ggml_tensor * logits, int64_t n_used);

// What the experts' sum begins with.
struct ExpertSumTerms {
    ggml_tensor * shared = nullptr; // f32 [n_embd, n_rows], times sigmoid(score); NULL: none
    ggml_tensor * score = nullptr;  // f32 [1, n_rows]
    ggml_tensor * add = nullptr;    // f32 [n_embd, n_rows], or NULL
};

// x: f32 [n_embd, n_rows] -> same. routed: route()'s.
ggml_tensor * packed_experts(GraphContext & g, const ExpertWeights & w, const Rows & x,
                             ggml_tensor * routed, const ExpertSumTerms & terms);

} // namespace dfl
