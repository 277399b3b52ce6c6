// Arranges the rows of a pass in padded batches for recurrent layers that ggml computes, and writes
// their inputs. Slots, update rows and lengths are inputs, so that few graphs serve any of them.
#pragma once

#include "graph/graph.h"
#include "graph/graph_sizes.h"

#include <cstdint>
#include <vector>

namespace dfl {

// Whether every device with recurrent layers has ggml's own operation for the chain.
bool has_fused_delta_rule(const RecurrentCache & cache, const RecurrentShape & shape);

// A batch, and the entry of the pass that each of its lanes has; -1: none. Lanes that are not in
// place and have none repeat another one, to the same effect.
struct RecurrentBatch {
    RecurrentBatchShape shape;
    std::vector<int32_t> entries;
};

// Options of make_recurrent_batches().
struct RecurrentBatchOptions {
    int64_t n_rows;         // of the pass with padding
    int64_t max_chunk_rows; // total rows of the chunks' lanes that are better than more shapes
    int64_t n_slots;        // most sequences
    bool fused;             // a chain is one operation
    bool tree_form;         // one that is verified is run as trees are
};

// Makes the batches of a pass: one of the sequences that append a row, some of prompt chunks of
// about one length, one of the verifies, as long as the longest.
std::vector<RecurrentBatch> make_recurrent_batches(const std::vector<RecurrentRows> & entries,
                                                   const GraphSizes & sizes,
                                                   const RecurrentBatchOptions & options);
// Largest number of batches of a pass, which bounds the nodes of a graph.
int64_t max_recurrent_batches(int64_t n_ubatch);

// Makes the inputs of cached.shape.recurrent.
void make_recurrent_inputs(CachedGraph & cached, const RecurrentShape & recurrent);
// Writes them for a pass; write_tree_inputs() also those of a promotion, which follow from its
// shape.
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
