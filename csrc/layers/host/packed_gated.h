// The gated half of a feed-forward with packed weights, as one node.
#pragma once

#include "layers/host/packed_input.h"

#include <algorithm>

namespace dfl {

// Columns that are gated and quantised together for `down`: whole blocks of the quantisation, and
// enough tiles to be worth a call.
inline int64_t gate_step(const cpu::PackedProduct & down) {
    constexpr int64_t enough = 64;
    return std::max<int64_t>(enough, down.block);
}

// Whether packed_gated() serves these weights: on the CPU, with x quantised alike.
bool gates_packed(const Build & b, const PackedMatrix & gate, const PackedMatrix & up);

// silu(gate x) * up x, quantised for `down`. A thread's columns of both meet where they were
// computed, and no other reads them before they are quantised.
PackedInput packed_gated(Build & b, const PackedMatrix & gate, const PackedMatrix & up,
                         const PackedMatrix & down, ggml_tensor * x);

} // namespace dfl
