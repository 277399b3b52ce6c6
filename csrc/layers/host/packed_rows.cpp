#include "layers/host/packed_rows.h"

#include "cpu/row_kernel.h"
#include "error.h"
#include "layers/host/float_rows.h"

namespace dfl {

static bool lies_as_rows(const ggml_tensor * x) {
    return x->type == GGML_TYPE_F32 && ggml_is_matrix(x) && x->nb[0] == sizeof(float);
}

// Whether x is what rms_norm() returns.
static bool is_weighted_norm(const ggml_tensor * x) {
    if (x->op != GGML_OP_MUL || x->src[0]->op != GGML_OP_RMS_NORM) {
        return false;
    }
    const ggml_tensor *rows = x->src[0]->src[0], *weight = x->src[1];
    return lies_as_rows(rows) && weight->type == GGML_TYPE_F32 &&
           ggml_nelements(weight) == rows->ne[0];
}

// The gate of x = values * sigmoid(gate) in heads, or NULL.
static ggml_tensor * sigmoid_gate(const ggml_tensor * x) {
    if (x->op != GGML_OP_MUL || x->src[1]->op != GGML_OP_UNARY ||
        ggml_get_unary_op(x->src[1]) != GGML_UNARY_OP_SIGMOID || !lies_as_rows(x->src[0])) {
        return nullptr;
    }
    ggml_tensor * gate = x->src[1]->src[0];
    if (gate->op != GGML_OP_CONT) {
        return nullptr;
    }
    gate = gate->src[0];
    const bool fits = gate->type == GGML_TYPE_F32 && gate->nb[0] == sizeof(float) &&
                      gate->ne[0] % cpu::row_kernel()->lanes == 0 && gate->ne[3] == 1 &&
                      gate->ne[0] * gate->ne[1] == x->ne[0] && gate->ne[2] == x->ne[1];
    return fits ? gate : nullptr;
}

PackedRows packed_rows(const Build & b, ggml_tensor * x) {
    using Kind = PackedRows::Kind;
    // Scratch is counted for graphs of the CPU alone.
    if (b.cpu_nodes.n_threads > 0 && x->ne[0] % cpu::row_kernel()->lanes == 0) {
        if (is_weighted_norm(x)) {
            return {Kind::NORM, x->src[0]->src[0], x->src[1], b.hp.eps};
        }
        if (ggml_tensor * gate = sigmoid_gate(x)) {
            return {Kind::GATED, x->src[0], gate};
        }
    }
    DFL_CHECK(lies_as_rows(x), DFL_STATUS_INTERNAL, "a product of a [%lld, %lld, %lld] of type %s",
              (long long)x->ne[0], (long long)x->ne[1], (long long)x->ne[2],
              ggml_type_name(x->type));
    return {Kind::PLAIN, x};
}

const float * make_row(const PackedRows & rows, const ggml_tensor * x, const ggml_tensor * with,
                       int64_t row, float * scratch) {
    const float * from = row_of(x, row);
    if (rows.kind == PackedRows::Kind::PLAIN) {
        return from;
    }
    const cpu::RowKernel & kernel = *cpu::row_kernel();
    const int64_t n = rows.width();
    if (rows.kind == PackedRows::Kind::NORM) {
        kernel.norm(from, n, static_cast<const float *>(with->data), rows.eps, scratch);
    } else {
        for (int64_t head = 0; head < with->ne[1]; ++head) {
            const auto * gate =
                static_cast<const char *>(with->data) + head * with->nb[1] + row * with->nb[2];
            const int64_t d = with->ne[0];
            kernel.gated(from + head * d, reinterpret_cast<const float *>(gate), d,
                         scratch + head * d);
        }
    }
    return scratch;
}

} // namespace dfl
