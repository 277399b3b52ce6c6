// Inputs of recurrent layers that follow the paths of a tree.
#pragma once

#include "graph/graph.h"

#include <cstdint>
#include <vector>

namespace dfl {

// Whether every device with recurrent layers has ggml's own operation for the chain.
bool has_fused_delta_rule(const RecurrentCache & cache, const RecurrentShape & shape);

// Inputs for live.shape.recurrent.
void make_path_inputs(LiveGraph & live, const RecurrentShape & recurrent);

// parents: of each of these that verifies, of every row, -1 for a root and for padding.
void write_path_inputs(const LiveGraph & live, const RecurrentShape & recurrent,
                       const std::vector<std::vector<int32_t>> & parents);

// The rows of (committed ++ new) convolution inputs under each tap, [d_conv][n]; parents: of the
// new ones, -1 or earlier.
std::vector<int32_t> convolution_taps(const std::vector<int32_t> & parents, int64_t d_conv);

} // namespace dfl
