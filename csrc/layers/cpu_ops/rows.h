// Rows that a product reads: there as they are, or made on the way into it, so that a norm or a
// gate before a product of ours needs no node of its own.
#pragma once

#include <cstdint>
#include <ggml.h>

namespace dfl {

struct GraphContext;

struct Rows {
    enum class Kind { PLAIN, NORMED, GATED };

    Rows(ggml_tensor * x) : x(x) {} // as they are

    Kind kind = Kind::PLAIN;
    ggml_tensor * x; // f32 [n, n_rows]
    ggml_tensor * operand =
        nullptr; // the norm's weight [n], or the gate in heads [d, n / d, n_rows]
    float eps = 0;

    int64_t width() const { return x->ne[0]; }
    int64_t n_rows() const { return x->ne[1]; }
    bool operator==(const Rows & o) const {
        return kind == o.kind && x == o.x && operand == o.operand && eps == o.eps;
    }
};

// rms(x) * weight. x: f32 [n, n_rows]; weight: f32 [n].
Rows normed(const GraphContext & g, ggml_tensor * x, ggml_tensor * weight);

// x * sigmoid(gate), head by head. x: f32 [d * n_head, n_rows]; gate: f32 [d, n_head, n_rows] with
// any strides.
Rows gated_heads(ggml_tensor * x, ggml_tensor * gate);

// The rows as a tensor [n, n_rows], by ggml's operations, which are added once.
ggml_tensor * tensor_of(GraphContext & g, const Rows & rows);

// The rows as make_row() takes them: those that it cannot make are made a tensor.
Rows readable(GraphContext & g, const Rows & rows);

// Row `row`, in `scratch` (width() floats) or where it lies. x, with: those of `rows`, with data.
const float * make_row(const Rows & rows, const ggml_tensor * x, const ggml_tensor * with,
                       int64_t row, float * scratch);

} // namespace dfl
