#include "layers/packed_gated.h"

#include "cpu/row_kernel.h"
#include "layers/packed_shares.h"

#include <algorithm>

namespace dfl {

namespace {

// Columns that are computed and quantised together: whole blocks of the quantisation, and enough
// tiles to be worth a call.
int64_t step_of(const PackedMatrix & down) {
    const bool blocks_of_32 = down.product->quantized_row_size(32) > 0;
    return !blocks_of_32 ? 256 : down.n_in % 64 == 0 ? 64 : 32;
}

// src: the input's. dst: quantised rows, then scratch for each thread.
class Gated : public CpuNode {
  public:
    Gated(const PackedMatrix & gate_up, const PackedMatrix & down, PackedInput input)
        : weight_(gate_up), down_(*down.product), input_(std::move(input)), n_ff_(down.n_in),
          step_(step_of(down)) {}

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
        const auto bytes = static_cast<int64_t>(weight_.bytes());
        const int64_t steps = n_ff_ / step_, parts = packed_parts(bytes, steps, nth);
        shares_.share_out(parts, is_long_product(bytes), ith, nth, [&](int64_t part) {
            for (int64_t i = part * steps / parts; i < (part + 1) * steps / parts; ++i) {
                gate(x, i * step_, values, to);
            }
        });
    }

  private:
    // Columns [first, first + step).
    void gate(const char * x, int64_t first, float * values, char * to) const {
        const int64_t n_rows = input_.n_rows(), tile = weight_.product->tile;
        float * up = values + n_rows * step_;
        multiply(x, first / tile, values - first);
        multiply(x, (n_ff_ + first) / tile, up - (n_ff_ + first));
        const auto at = static_cast<int64_t>(down_.quantized_row_size(first));
        for (int64_t row = 0; row < n_rows; ++row) {
            float * gated = values + row * step_;
            cpu::row_kernel()->swiglu(gated, up + row * step_, step_, gated);
            down_.quantize_row(gated, step_, to + row * row_size() + at);
        }
    }

    // A step's tiles from `tile` on. to: where output 0 would be.
    void multiply(const char * x, int64_t tile, float * to) const {
        const int64_t tiles = step_ / weight_.product->tile;
        weight_.product->multiply(weight_.data, weight_.n_in, weight_.n_out, x, input_.n_rows(),
                                  tile, tile + tiles, to, step_);
    }

    const PackedMatrix & weight_;
    const cpu::PackedProduct & down_;
    PackedInput input_;
    int64_t n_ff_, step_;
};

} // namespace

bool gates_packed(const Build & b, const PackedMatrix & gate_up, const PackedMatrix & down) {
    return b.cpu_nodes.n_threads > 0 && cpu::row_kernel() != nullptr &&
           down.n_in % step_of(down) == 0 && gate_up.n_out == 2 * down.n_in;
}

PackedInput packed_gated(Build & b, const PackedMatrix & gate_up, const PackedMatrix & down,
                         ggml_tensor * x) {
    const PackedInput input(b, *gate_up.product, x);
    auto work = std::make_unique<Gated>(gate_up, down, input);
    const int64_t bytes = whole_lines(input.n_rows() * work->row_size()) +
                          b.cpu_nodes.n_threads * work->scratch_size();
    ggml_tensor * node = add_cpu_node(b, GGML_TYPE_I8, bytes, 1, input.sources(), std::move(work));
    return {*down.product, node, down.n_in, input.n_rows()};
}

} // namespace dfl
