#include "layers/cpu_ops/row_copies.h"

#include "layers/cpu_ops/float_rows.h"

#include <cstring>

namespace dfl {

namespace {

// src: x, picked.
class Pick : public CpuNode {
  public:
    void compute(ggml_tensor * dst, int ith, int nth) override {
        const auto * picked = static_cast<const int32_t *>(dst->src[1]->data);
        for (int64_t i = ith; i < dst->ne[1]; i += nth) {
            std::memcpy(row_of(dst, i), row_of(dst->src[0], picked[i]), dst->ne[0] * sizeof(float));
        }
    }
};

// src: x, rows, to. dst: nothing.
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

ggml_tensor * pick_rows(Build & b, ggml_tensor * x, ggml_tensor * picked) {
    if (b.cpu_nodes.n_threads == 0) {
        return ggml_get_rows(b.ctx, x, picked);
    }
    return add_cpu_node(b, GGML_TYPE_F32, x->ne[0], picked->ne[0], {x, picked},
                        std::make_unique<Pick>());
}

void put_rows(Build & b, ggml_tensor * to, ggml_tensor * x, ggml_tensor * rows) {
    ggml_tensor * node =
        b.cpu_nodes.n_threads == 0
            ? ggml_set_rows(b.ctx, to, x, rows)
            : add_cpu_node(b, GGML_TYPE_F32, 1, 1, {x, rows, to}, std::make_unique<Put>());
    ggml_build_forward_expand(b.graph, node);
}

} // namespace dfl
