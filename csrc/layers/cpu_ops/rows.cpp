#include "layers/cpu_ops/rows.h"

#include "cpu/rows/row_kernel.h"
#include "error.h"
#include "layers/cpu_ops/float_rows.h"
#include "layers/cpu_ops/graph_context.h"

namespace dfl {

Rows normed(const GraphContext & g, ggml_tensor * x, ggml_tensor * weight) {
    Rows rows(x);
    rows.kind = Rows::Kind::NORMED;
    rows.operand = weight;
    rows.eps = g.hp.eps;
    return rows;
}

Rows gated_heads(ggml_tensor * x, ggml_tensor * gate) {
    Rows rows(x);
    rows.kind = Rows::Kind::GATED;
    rows.operand = gate;
    return rows;
}

static ggml_tensor * built(GraphContext & g, const Rows & rows) {
    if (rows.kind == Rows::Kind::NORMED) {
        return ggml_mul(g.ctx, ggml_rms_norm(g.ctx, rows.x, rows.eps), rows.operand);
    }
    ggml_tensor * gate = ggml_cont_2d(g.ctx, rows.operand, rows.width(), rows.n_rows());
    return ggml_mul(g.ctx, rows.x, ggml_sigmoid(g.ctx, gate));
}

ggml_tensor * tensor_of(GraphContext & g, const Rows & rows) {
    if (rows.kind == Rows::Kind::PLAIN) {
        return rows.x;
    }
    // Searches from the end, since operations that share rows are mostly close to each other.
    for (auto made = g.made_rows.rbegin(); made != g.made_rows.rend(); ++made) {
        if (made->rows == rows) {
            return made->tensor;
        }
    }
    g.made_rows.push_back({rows, built(g, rows)});
    return g.made_rows.back().tensor;
}

static bool lies_as_rows(const ggml_tensor * x) {
    return x->type == GGML_TYPE_F32 && ggml_is_matrix(x) && x->nb[0] == sizeof(float);
}

// True if our products can norm or gate these rows; graphs with another device lack scratch for it.
static bool can_make(const GraphContext & g, const Rows & rows) {
    const int64_t lanes = cpu::row_kernel()->lanes;
    const int64_t part = rows.kind == Rows::Kind::GATED ? rows.operand->ne[0] : rows.width();
    return g.cpu_nodes.n_threads > 0 && lies_as_rows(rows.x) && part % lanes == 0 &&
           rows.operand->type == GGML_TYPE_F32 && rows.operand->nb[0] == sizeof(float);
}

Rows readable(GraphContext & g, const Rows & rows) {
    if (rows.kind != Rows::Kind::PLAIN && can_make(g, rows)) {
        return rows;
    }
    ggml_tensor * x = tensor_of(g, rows);
    DFL_CHECK(lies_as_rows(x), DFL_STATUS_INTERNAL,
              "a product needs rows of type f32, not a tensor [%lld, %lld, %lld] of type %s",
              (long long)x->ne[0], (long long)x->ne[1], (long long)x->ne[2],
              ggml_type_name(x->type));
    return x;
}

const float * make_row(const Rows & rows, const ggml_tensor * x, const ggml_tensor * with,
                       int64_t row, float * scratch) {
    const float * from = row_of(x, row);
    if (rows.kind == Rows::Kind::PLAIN) {
        return from;
    }
    const cpu::RowKernel & kernel = *cpu::row_kernel();
    if (rows.kind == Rows::Kind::NORMED) {
        kernel.norm(from, rows.width(), static_cast<const float *>(with->data), rows.eps, scratch);
        return scratch;
    }
    const int64_t d = with->ne[0];
    for (int64_t head = 0; head < with->ne[1]; ++head) {
        const auto * gate =
            static_cast<const char *>(with->data) + head * with->nb[1] + row * with->nb[2];
        kernel.gated(from + head * d, reinterpret_cast<const float *>(gate), d, scratch + head * d);
    }
    return scratch;
}

} // namespace dfl
