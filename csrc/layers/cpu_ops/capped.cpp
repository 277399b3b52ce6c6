#include "layers/cpu_ops/capped.h"

#include "cpu/rows/row_kernel.h"
#include "layers/cpu_ops/float_rows.h"

namespace dfl {

namespace {

// Applies the softcap to dst in place. Threads share each row, because plain decoding has only one.
class Cap : public CpuNode {
  public:
    explicit Cap(float cap) : cap_(cap) {}

    void compute(ggml_tensor * dst, int ith, int nth) override {
        const int64_t first = dst->ne[0] * ith / nth, last = dst->ne[0] * (ith + 1) / nth;
        for (int64_t row = 0; row < dst->ne[1]; ++row) {
            float * at = row_of(dst, row) + first;
            kernel_.cap(at, last - first, 1.0f / cap_, cap_, at);
        }
    }

  private:
    const cpu::RowKernel & kernel_ = *cpu::row_kernel();
    float cap_;
};

} // namespace

ggml_tensor * capped(GraphContext & g, ggml_tensor * logits, float cap) {
    if (g.cpu_nodes.n_threads == 0) {
        logits = ggml_tanh(g.ctx, ggml_scale(g.ctx, logits, 1.0f / cap));
        return ggml_scale(g.ctx, logits, cap);
    }
    return add_cpu_node_in_place(g, logits, std::make_unique<Cap>(cap));
}

} // namespace dfl
