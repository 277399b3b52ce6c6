#include "layers/host/packed_gated.h"

#include "cpu/row_kernel.h"
#include "layers/host/packed_shares.h"

#include <algorithm>

namespace dfl {

namespace {

// src: the input's. dst: quantised rows, then scratch for each thread.
class Gated : public CpuNode {
  public:
    Gated(const PackedMatrix & gate, const PackedMatrix & up, const cpu::PackedProduct & down,
          PackedInput input)
        : gate_(gate), up_(up), down_(down), input_(std::move(input)), n_ff_(gate.n_out),
          step_(gate_step(down)) {}

    int64_t row_size() const { return static_cast<int64_t>(down_.quantized_row_size(n_ff_)); }

    // Bytes of a thread: its input, and gates and what they act on for one step.
    int64_t scratch_size() const {
        return input_.scratch_size() + whole_lines(2 * input_.n_rows() * step_ * sizeof(float));
    }

    void compute(ggml_tensor * dst, int ith, int nth) override {
        auto * to = static_cast<char *>(dst->data);
        char * scratch = to + whole_lines(input_.n_rows() * row_size()) + ith * scratch_size();
        const char * x = input_.quantized(dst, scratch);
        auto * values = reinterpret_cast<float *>(scratch + input_.scratch_size());
        const auto bytes = static_cast<int64_t>(gate_.bytes() + up_.bytes());
        const int64_t steps = (n_ff_ + step_ - 1) / step_, parts = packed_parts(bytes, steps, nth);
        shares_.share_out(parts, is_long_product(bytes), ith, nth, [&](int64_t part) {
            for (int64_t i = part * steps / parts; i < (part + 1) * steps / parts; ++i) {
                gate(x, i * step_, values, to);
            }
        });
    }

  private:
    // Columns [first, first + step), or as many as there are.
    void gate(const char * x, int64_t first, float * values, char * to) const {
        const int64_t n_rows = input_.n_rows(), n = std::min(step_, n_ff_ - first);
        float * ups = values + n_rows * step_;
        if (n < step_) { // what follows the last columns is computed, too, by whole vectors
            std::fill(values, ups + n_rows * step_, 0.0f);
        }
        multiply(gate_, x, first, values);
        multiply(up_, x, first, ups);
        const auto at = static_cast<int64_t>(down_.quantized_row_size(first));
        for (int64_t row = 0; row < n_rows; ++row) {
            float * gated = values + row * step_;
            cpu::row_kernel()->swiglu(gated, ups + row * step_, step_, gated);
            down_.quantize_row(gated, n, to + row * row_size() + at);
        }
    }

    // A step's columns from `first` on.
    void multiply(const PackedMatrix & weight, const char * x, int64_t first, float * to) const {
        const int64_t tile = weight.product->tile;
        weight.product->multiply(weight.data, weight.n_in, weight.n_out, x, input_.n_rows(),
                                 first / tile, std::min((first + step_) / tile, weight.n_tiles()),
                                 to - first, step_);
    }

    const PackedMatrix & gate_;
    const PackedMatrix & up_;
    const cpu::PackedProduct & down_;
    PackedInput input_;
    int64_t n_ff_, step_;
};

} // namespace

bool gates_packed(const Build & b, const PackedMatrix & gate, const PackedMatrix & up) {
    return b.cpu_nodes.n_threads > 0 && gate.product->quantize_row == up.product->quantize_row;
}

PackedInput packed_gated(Build & b, const PackedMatrix & gate, const PackedMatrix & up,
                         const PackedMatrix & down, ggml_tensor * x) {
    const PackedInput input(b, *gate.product, x);
    auto work = std::make_unique<Gated>(gate, up, *down.product, input);
    const int64_t bytes = whole_lines(input.n_rows() * work->row_size()) +
                          b.cpu_nodes.n_threads * work->scratch_size();
    ggml_tensor * node = add_cpu_node(b, GGML_TYPE_I8, bytes, 1, input.sources(), std::move(work));
    return {*down.product, node, down.n_in, input.n_rows()};
}

} // namespace dfl
