// Inputs of recurrent layers that follow the paths of a tree.
#pragma once

#include "graph/graph.h"

#include <cstdint>
#include <vector>

namespace dfl {

// Whether every device with recurrent layers has ggml's own operation for the chain.
bool has_fused_delta_rule(const RecurrentCache & cache, const RecurrentShape & shape);

// Inputs for live.shape, which is by_paths.
void make_path_inputs(LiveGraph & live, const RecurrentShape & recurrent);

// parents: of every row, -1 for a root and for padding; empty: each row follows the one before.
void write_path_inputs(const LiveGraph & live, const RecurrentShape & recurrent,
                       const std::vector<int32_t> & parents);

} // namespace dfl
