// Arranges the rows of a pass in padded batches for recurrent layers that ggml runs. Slots, update
// rows and lengths are graph inputs, so that few graphs serve all passes.
#pragma once

#include "graph/graph.h"
#include "graph/graph_sizes.h"

#include <cstdint>
#include <vector>

namespace dfl {

// True if all devices with recurrent layers have ggml's fused delta-net operation.
bool has_fused_delta_rule(const RecurrentCache & cache, const RecurrentShape & shape);

// A padded batch, and the index of the pass entry of each lane, or -1 for idle lanes. If lanes are
// not in place, idle lanes repeat the entry of another lane and write the same values.
struct RecurrentBatch {
    RecurrentBatchShape shape;
    std::vector<int32_t> entries;
};

struct RecurrentBatchOptions {
    int64_t n_rows;         // number of rows of the pass, padding included
    int64_t max_chunk_rows; // most rows of a batch of prompt chunks, padding included
    int64_t n_slots;        // number of sequences that the engine can hold
    bool fused;             // true: a chain runs as one fused operation
    bool tree_form;         // true: verifies of chains run in tree form, too
};

// Makes the batches of a pass: single rows, prompt chunks of similar length, and verifies.
std::vector<RecurrentBatch> make_recurrent_batches(const std::vector<RecurrentRows> & entries,
                                                   const GraphSizes & sizes,
                                                   const RecurrentBatchOptions & options);
// Returns the largest number of batches of a pass, which bounds the nodes of a graph.
int64_t max_recurrent_batches(int64_t n_ubatch);

// Makes the input tensors of all recurrent batches in cached.shape.
void make_recurrent_inputs(CachedGraph & cached, const RecurrentShape & recurrent);
// Write the inputs of recurrent batches for a pass. A promotion needs only write_tree_inputs().
void write_recurrent_inputs(const CachedGraph & cached, const RecurrentCache & cache,
                            const RecurrentShape & recurrent,
                            const std::vector<RecurrentBatch> & batches,
                            const std::vector<RecurrentRows> & entries);
void write_tree_inputs(const CachedGraph & cached, const RecurrentShape & recurrent,
                       const std::vector<RecurrentBatch> & batches,
                       const std::vector<RecurrentRows> & entries);

// Returns the indices of the convolution inputs that each tap reads for n new rows, [d_conv][n].
// The d_conv - 1 committed inputs come before the new rows. parents: parent of each new row, or -1.
std::vector<int32_t> convolution_taps(const std::vector<int32_t> & parents, int64_t d_conv);

} // namespace dfl
