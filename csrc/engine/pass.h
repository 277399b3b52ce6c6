// The rows of one pass of the target.
#pragma once

#include "cache/tree.h"
#include "graph/graph.h"

#include <cstdint>
#include <vector>

namespace dfl {

// Those of a verify may end with padding: copies of the root that write where nobody looks.
struct Pass {
    GraphKind kind = GraphKind::APPEND;
    std::vector<int32_t> tokens, positions;
    std::vector<int64_t> cells;
    std::vector<int64_t> feature_rows; // empty: no taps
    Tree tree;                         // of a verify
    std::vector<bool> finite;          // of a verify: whether a row's logits are
    int64_t n = 0;                     // rows that are not padding
    bool began = false;                // computing: recurrent states may have moved

    int64_t n_rows() const { return static_cast<int64_t>(tokens.size()); }
};

} // namespace dfl
