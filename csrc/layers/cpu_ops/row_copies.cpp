#include "layers/cpu_ops/row_copies.h"

#include "layers/cpu_ops/float_rows.h"

#include <cstring>

namespace dfl {

namespace {

class Pick : public CpuNode {
  public:
    void compute(ggml_tensor * dst, int ith, int nth) override {
        const auto * ids = static_cast<const int32_t *>(dst->src[1]->data);
        for (int64_t i = ith; i < dst->ne[1]; i += nth) {
            std::memcpy(row_of(dst, i), row_of(dst->src[0], ids[i]), dst->ne[0] * sizeof(float));
        }
    }
};

class Put : public CpuNode {
  public:
    void compute(ggml_tensor * dst, int ith, int nth) override {
        const ggml_tensor *x = dst->src[0], *to = dst->src[2];
        const auto * rows = static_cast<const int64_t *>(dst->src[1]->data);
        for (int64_t i = ith; i < x->ne[1]; i += nth) {
            std::memcpy(row_of(to, rows[i]), row_of(x, i), x->ne[0] * sizeof(float));
        }
    }
};

} // namespace

ggml_tensor * gather_rows(GraphContext & g, ggml_tensor * x, ggml_tensor * ids) {
    if (g.cpu_nodes.n_threads == 0) {
        return ggml_get_rows(g.ctx, x, ids);
    }
    return add_cpu_node(g, GGML_TYPE_F32, x->ne[0], ids->ne[0], {x, ids}, std::make_unique<Pick>());
}

void scatter_rows(GraphContext & g, ggml_tensor * to, ggml_tensor * x, ggml_tensor * rows) {
    ggml_tensor * node =
        g.cpu_nodes.n_threads == 0
            ? ggml_set_rows(g.ctx, to, x, rows)
            : add_cpu_node(g, GGML_TYPE_F32, 1, 1, {x, rows, to}, std::make_unique<Put>());
    ggml_build_forward_expand(g.graph, node);
}

} // namespace dfl
