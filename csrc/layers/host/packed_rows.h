// Rows on their way into packed products: what makes them from what is there already, so that a
// norm, an activation or a gate needs no node of its own before them.
#pragma once

#include "layers/host/build.h"

namespace dfl {

// How a row of x is made. Only what takes part in it is read when the graph runs.
struct PackedRows {
    enum class Kind { PLAIN, NORM, GATED };

    Kind kind = Kind::PLAIN;
    ggml_tensor * x = nullptr;    // rows of floats
    ggml_tensor * with = nullptr; // the norm's weight, or the gate in heads [d, n_head, n_rows]
    float eps = 0;

    // Values of a row.
    int64_t width() const { return x->ne[0]; }
    int64_t n_rows() const { return x->ne[1]; }
};

// How x comes about, if it is one of the kinds above; else it is rows that are plainly there. Its
// own nodes then run only if something else wants them.
PackedRows packed_rows(const Build & b, ggml_tensor * x);

// Row `row`, in `scratch` (width() floats) or where it lies. from: what lies at x and with.
const float * make_row(const PackedRows & rows, const ggml_tensor * x, const ggml_tensor * with,
                       int64_t row, float * scratch);

} // namespace dfl
