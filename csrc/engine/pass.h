// The rows of one pass of the target, and the sequences that the rows belong to.
#pragma once

#include "cache/kv_cache.h"
#include "cache/recurrent_cache.h"
#include "cache/tree.h"
#include "graph/graph.h"
#include "graph/recurrent_batch.h"

#include <cstdint>
#include <vector>

namespace dfl {

class Sequence;

// Part of a batch: a sequence's tokens to append or verify. dfl_batch_entry describes the fields.
struct BatchEntry {
    Sequence * sequence = nullptr;
    bool is_verify = false;
    const int32_t * tokens = nullptr;
    int64_t n = 0;
    const int32_t * parents = nullptr;
    int64_t n_remaining = 0;
    float * all_logits = nullptr;
    float * all_features = nullptr;
};

// Rows [first, first + n) of a pass, which compute a batch entry or a micro-batch of it.
struct PassEntry {
    Sequence * sequence = nullptr;
    bool is_verify = false;
    int64_t first = 0, n = 0;
    Tree tree;
    // Cells that the rows write, for each K/V group; a verify may have one more cell for padding.
    std::vector<std::vector<int64_t>> cells;
    bool is_tapped = false; // True if a drafter or the caller reads the features of the rows
    std::vector<int64_t> feature_rows; // rows of the feature ring that receive the features
    int64_t first_out = 0, n_out = 0;  // readable rows of the pass's logits: index of first, number
    bool reads_all_logits = false;
    UpdateRows updates;       // first rows of a verify in node_updates and conv_updates
    std::vector<bool> finite; // True for each finite row, see Engine::find_finite_rows()
};

// All rows of a pass. Padding comes last, as copies of the first row of the last entry.
struct Pass {
    std::vector<PassEntry> entries;
    std::vector<int32_t> tokens, positions;
    std::vector<std::vector<int64_t>> cells;
    std::vector<RecurrentRows> recurrent_rows;
    std::vector<RecurrentBatch> recurrent_batches;
    int64_t n_real = 0;
    bool has_started = false; // True if the pass may have changed recurrent states

    int64_t n_rows() const { return static_cast<int64_t>(tokens.size()); }
    int64_t n_out() const {
        int64_t n = 0;
        for (const PassEntry & entry : entries) {
            n += entry.n_out;
        }
        return n;
    }
};

} // namespace dfl
