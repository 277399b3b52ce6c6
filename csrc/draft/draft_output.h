// Results of a draft: the best candidates and the log-sum-exp of each position.
#pragma once

#include "graph/graph.h"
#include "sampling/top_k.h"

#include <vector>

namespace dfl {

struct Draft {
    std::vector<Candidate> best;    // best candidates, [n_draft][k], best first
    std::vector<float> log_sum_exp; // log-sum-exp of each whole row, [n_draft]
};

// Adds outputs to the graph of a draft: logits [n_vocab, n_draft], the cached.shape.n_top best of
// each row (0: the host selects), and log-sum-exp (CPU) or probabilities (other devices).
void add_draft_output(CachedGraph & cached, ggml_tensor * logits);

// Reads the k best candidates of each row, the lower token first on ties; shape.n_top is k or 0.
Draft read_draft(const CachedGraph & cached, int64_t k, const Backend & backend);

// True if the device can select the k best of n logits. False for a CPU.
bool can_select_on_device(const Backend & backend, int64_t n, int64_t k);
// True if the device should first select the best of blocks of a row, as sorting rows is slow.
bool selects_by_blocks(const Backend & backend);

} // namespace dfl
