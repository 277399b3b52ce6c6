// Input rows of a product. Our own products norm or gate rows while reading, without a node for it.
#pragma once

#include <cstdint>
#include <ggml.h>

namespace dfl {

struct GraphContext;

struct Rows {
    enum class Kind { PLAIN, NORMED, GATED };

    Rows(ggml_tensor * x) : x(x) {}

    Kind kind = Kind::PLAIN;
    ggml_tensor * x;
    // Weight of the norm [n], or gate by heads [d, n / d, n_rows]; NULL for plain rows.
    ggml_tensor * operand = nullptr;
    float eps = 0;

    int64_t width() const { return x->ne[0]; }
    int64_t n_rows() const { return x->ne[1]; }
    bool operator==(const Rows & o) const {
        return kind == o.kind && x == o.x && operand == o.operand && eps == o.eps;
    }
};

// Returns the rows rms_norm(x) * weight. x: f32 [n, n_rows]; weight: f32 [n].
Rows normed(const GraphContext & g, ggml_tensor * x, ggml_tensor * weight);

// Returns rows x * sigmoid(gate). x: f32 [d * n_head, n_rows]; gate: f32 [d, n_head, n_rows].
Rows gated_heads(ggml_tensor * x, ggml_tensor * gate);

// Gathers rows into a tensor [n, n_rows] with ggml's operations; equal arguments share the tensor.
ggml_tensor * tensor_of(GraphContext & g, const Rows & rows);

// Returns `rows` if products can norm or gate them while reading, else a tensor of the results.
Rows readable(GraphContext & g, const Rows & rows);

// Norms or gates row `row` into scratch, width() floats, or returns a plain row in place. x, with:
// the tensors rows.x and rows.operand, with their data.
const float * make_row(const Rows & rows, const ggml_tensor * x, const ggml_tensor * with,
                       int64_t row, float * scratch);

} // namespace dfl
