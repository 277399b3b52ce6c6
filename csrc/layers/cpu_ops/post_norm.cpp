#include "layers/cpu_ops/post_norm.h"

#include "cpu/rows/row_kernel.h"
#include "layers/cpu_ops/float_rows.h"

namespace dfl {

namespace {

// CPU node of post_normed(). src: y, norm weight, then `add` and `scale` if they are not NULL.
class PostNorm : public CpuNode {
  public:
    PostNorm(float eps, bool adds, bool scales) : eps_(eps), adds_(adds), scales_(scales) {}

    void compute(ggml_tensor * dst, int ith, int nth) override {
        const int64_t n = dst->ne[0];
        const auto * weight = static_cast<const float *>(dst->src[1]->data);
        for (int64_t row = ith; row < dst->ne[1]; row += nth) {
            float * to = row_of(dst, row);
            kernel_.norm(row_of(dst->src[0], row), n, weight, eps_, to);
            if (adds_) {
                const float * add = row_of(dst->src[2], row);
                for (int64_t i = 0; i < n; ++i) {
                    to[i] += add[i];
                }
            }
            if (scales_) {
                const float scale = *static_cast<const float *>(dst->src[adds_ ? 3 : 2]->data);
                for (int64_t i = 0; i < n; ++i) {
                    to[i] *= scale;
                }
            }
        }
    }

  private:
    const cpu::RowKernel & kernel_ = *cpu::row_kernel();
    float eps_;
    bool adds_, scales_;
};

} // namespace

static ggml_tensor * by_ggml(GraphContext & g, ggml_tensor * y, ggml_tensor * weight,
                             ggml_tensor * add, ggml_tensor * scale) {
    y = ggml_mul(g.ctx, ggml_rms_norm(g.ctx, y, g.hp.eps), weight);
    y = add != nullptr ? ggml_add(g.ctx, y, add) : y;
    return scale != nullptr ? ggml_mul(g.ctx, y, scale) : y;
}

ggml_tensor * post_normed(GraphContext & g, ggml_tensor * y, ggml_tensor * weight,
                          ggml_tensor * add, ggml_tensor * scale) {
    if (g.cpu_nodes.n_threads == 0) {
        return by_ggml(g, y, weight, add, scale);
    }
    std::vector<ggml_tensor *> src = {y, weight};
    for (ggml_tensor * more : {add, scale}) {
        if (more != nullptr) {
            src.push_back(more);
        }
    }
    return add_cpu_node(g, GGML_TYPE_F32, y->ne[0], y->ne[1], src,
                        std::make_unique<PostNorm>(g.hp.eps, add != nullptr, scale != nullptr));
}

} // namespace dfl
