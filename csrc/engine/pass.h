// The rows of one pass of the target, and whose they are.
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

// Part of a batch: tokens of one sequence to append or to verify.
struct BatchEntry {
    Sequence * sequence = nullptr;
    bool is_verify = false; // else they are appended
    const int32_t * tokens = nullptr;
    int64_t n = 0;
    const int32_t * parents = nullptr; // of a verify; NULL: a chain
    int64_t n_remaining = 0;           // of an append: tokens that will follow it
    float * all_logits = nullptr;      // of an append: NULL, or every token's, [n_vocab, n]
};

// Rows of a batch entry in a pass, [first, first + n).
struct PassEntry {
    Sequence * sequence = nullptr;
    bool is_verify = false;
    int64_t first = 0, n = 0;
    Tree tree; // of a verify
    // Cells that its rows write, of each group of layers; after those of a verify comes the cell of
    // padding, if there is some.
    std::vector<std::vector<int64_t>> cells;
    bool is_tapped = false;            // some drafter reads its features
    std::vector<int64_t> feature_rows; // rows of the ring that its features go to
    int64_t first_out = 0, n_out = 0;  // rows whose logits can be read, among those of the pass
    bool reads_all_logits = false;     // all of them at once
    UpdateRows updates;                // of a verify
    std::vector<bool> finite;          // of its rows: Engine::find_finite_rows()
};

struct Pass {
    std::vector<PassEntry> entries;
    // Of all rows; padding comes last: copies of the first row of the last entry.
    std::vector<int32_t> tokens, positions;
    std::vector<std::vector<int64_t>> cells; // of each group of layers
    // Rows of each entry as recurrent layers take them and, where ggml computes these, their
    // batches.
    std::vector<RecurrentRows> recurrent_rows;
    std::vector<RecurrentBatch> recurrent_batches;
    int64_t n_real = 0;
    bool has_started = false; // computing: recurrent states may have moved

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
