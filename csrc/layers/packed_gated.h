// The gated half of a feed-forward with packed weights, as one node.
#pragma once

#include "layers/packed_input.h"

namespace dfl {

// Whether packed_gated() serves these weights: on the CPU, of n_ff columns each.
bool gates_packed(const Build & b, const PackedMatrix & gate_up, const PackedMatrix & down);

// silu(gate x) * up x, quantised for `down`. gate_up: gate's rows, then up's. A thread's columns of
// both meet where they were computed, and no other reads them before they are quantised.
PackedInput packed_gated(Build & b, const PackedMatrix & gate_up, const PackedMatrix & down,
                         ggml_tensor * x);

} // namespace dfl
