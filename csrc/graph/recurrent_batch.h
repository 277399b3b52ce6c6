// How the rows of a pass lie in lanes for recurrent layers that ggml computes, and the inputs that
// say so. Slots, places in the trace and lengths are inputs, so that few graphs serve any of them.
#pragma once

#include "graph/graph.h"
#include "graph/graph_sizes.h"

#include <cstdint>
#include <vector>

namespace dfl {

// Whether every device with recurrent layers has ggml's own operation for the chain.
bool has_fused_delta_rule(const RecurrentCache & cache, const RecurrentShape & shape);

// Which item of a pass each lane has; -1: none. Lanes that are not in place and have none repeat
// another one, to the same effect.
struct RecurrentBatch {
    RecurrentBatchShape shape;
    std::vector<int32_t> entries;
};

// What make_recurrent_batches() goes by.
struct RecurrentBatchOptions {
    int64_t n_rows;         // of the pass with padding
    int64_t max_chunk_rows; // rows of pieces' lanes that are better than more shapes
    int64_t n_slots;        // most sequences
    bool fused;             // a chain is one operation
    bool tree_form;         // one that is verified is run as trees are
};

// Sequences that append a row have lanes side by side; pieces of prompts share lanes of about their
// length; verifies, which may be trees, those of the longest.
std::vector<RecurrentBatch> make_recurrent_batches(const std::vector<RecurrentRows> & entries,
                                                   const GraphSizes & sizes,
                                                   const RecurrentBatchOptions & options);
// Most of a pass: graphs are bounded by it.
int64_t max_recurrent_batches(int64_t n_ubatch);

// Inputs for live.shape.recurrent.
void make_recurrent_inputs(CachedGraph & cached, const RecurrentShape & recurrent);
// What they are for a pass; of those of a promotion, what follows from its shape.
void write_recurrent_inputs(const CachedGraph & cached, const RecurrentCache & cache,
                            const RecurrentShape & recurrent,
                            const std::vector<RecurrentBatch> & batches,
                            const std::vector<RecurrentRows> & entries);
void write_tree_inputs(const CachedGraph & cached, const RecurrentShape & recurrent,
                       const std::vector<RecurrentBatch> & batches,
                       const std::vector<RecurrentRows> & entries);

// The rows of (committed ++ new) convolution inputs under each tap, [d_conv][n]; parents: of the
// new ones, -1 or earlier.
std::vector<int32_t> convolution_taps(const std::vector<int32_t> & parents, int64_t d_conv);

} // namespace dfl
