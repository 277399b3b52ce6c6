// Mixture of experts with packed weights. Rows are grouped by expert, to read each weight once. A
// row's experts are summed in index order, so that its result does not depend on other rows.
#pragma once

#include "layers/cpu_ops/graph_context.h"

namespace dfl {

// Chooses the n_used best experts of each row by logits, f32 [n_expert, n_rows]. Their weights are
// the softmax over the chosen logits, which equals the renormalised softmax over all logits.
ggml_tensor * route(GraphContext & g, ggml_tensor * logits, int64_t n_used);

// Terms added to the experts' sum: shared * sigmoid(score [1, n_rows]), and add; each may be NULL.
struct ExpertSumTerms {
    ggml_tensor * shared = nullptr;
    ggml_tensor * score = nullptr;
    ggml_tensor * add = nullptr;
};

// Returns the weighted sum of the experts that route() chose, plus terms: f32 [n_embd, n_rows].
ggml_tensor * packed_experts(GraphContext & g, const ExpertWeights & w, const Rows & x,
                             ggml_tensor * routed, const ExpertSumTerms & terms);

} // namespace dfl
