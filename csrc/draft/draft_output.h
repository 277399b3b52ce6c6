// What is read of a draft: per position the best candidates and the row's log-sum-exp, picked on
// the device where its logits do not lie in host memory.
#pragma once

#include "graph/graph.h"
#include "sampling/top_k.h"

#include <vector>

namespace dfl {

struct Draft {
    std::vector<Candidate> best;    // [n_draft][k], best first
    std::vector<float> log_sum_exp; // [n_draft] of the whole rows
    std::vector<float> sums;        // likewise of raw logits, of a target's
};

// Marks the logits [n_rows, n_draft] as outputs and adds the selection of cached.shape: the n_top
// best on the device (0: the host looks for them), and the rows' probabilities.
void add_draft_output(CachedGraph & cached, ggml_tensor * logits);

// The k best of each row, lower row of the head first on ties; k is shape.n_top unless that is 0.
Draft read_draft(const CachedGraph & cached, int64_t k, const Backend & backend);

// True if the device selects the k best of n itself.
bool can_select_on_device(const Backend & backend, int64_t n, int64_t k);
// Returns true if the device selects by blocks, as it sorts whole rows slowly.
bool selects_by_blocks(const Backend & backend);

} // namespace dfl
