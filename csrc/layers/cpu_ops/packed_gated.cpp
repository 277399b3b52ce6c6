#include "layers/cpu_ops/packed_gated.h"

#include "cpu/rows/row_kernel.h"

#include <algorithm>

namespace dfl {

// Computes gate <- act(gate) * up. Every activation is rewritten for the kernel's x * sigmoid(x).
static void activate(Activation kind, float * gate, float * up, int64_t n) {
    if (kind == Activation::GELU) {
        // GELU by tanh is g * sigmoid(z), z = 2 sqrt(2 / pi) (g + 0.044715 g^3) = ratio * g.
        for (int64_t i = 0; i < n; ++i) {
            const float ratio = 1.5957691216f * (1.0f + 0.044715f * gate[i] * gate[i]);
            gate[i] *= ratio;
            up[i] /= ratio;
        }
    }
    if (kind == Activation::CLAMPED_SILU) {
        for (int64_t i = 0; i < n; ++i) {
            gate[i] = std::min(gate[i], GATE_LIMIT) * GATE_SHARPNESS;
            up[i] = (std::clamp(up[i], -GATE_LIMIT, GATE_LIMIT) + 1.0f) / GATE_SHARPNESS;
        }
    }
    cpu::row_kernel()->swiglu(gate, up, n, gate);
}

// Returns the columns that a step gates: whole quantisation blocks, and enough to outweigh a call.
static int64_t step_for(const cpu::PackedProduct & down) {
    constexpr int64_t enough = 64;
    return std::max<int64_t>(enough, down.block);
}

GatedSteps::GatedSteps(const Linear & gate, const Linear & up, const Linear & down,
                       Activation activation)
    : gate_(gate), up_(up), down_(*down.packed->product), activation_(activation),
      step_(step_for(down_)) {}

int64_t GatedSteps::row_size() const {
    return static_cast<int64_t>(down_.quantized_row_size(gate_.packed->n_out));
}

int64_t GatedSteps::scratch_size(int64_t n_rows) const {
    return whole_lines(2 * n_rows * step_ * sizeof(float));
}

void GatedSteps::run(int64_t step, int64_t expert, const char * x, int64_t n_rows, char * scratch,
                     char * to) const {
    const int64_t first = step * step_, n = std::min(step_, gate_.packed->n_out - first);
    auto * gates = reinterpret_cast<float *>(scratch);
    float * ups = gates + n_rows * step_;
    if (n < step_) { // zeroes the columns beyond n, which activate() reads too
        std::fill(gates, ups + n_rows * step_, 0.0f);
    }
    multiply(gate_, expert, x, n_rows, first, gates);
    multiply(up_, expert, x, n_rows, first, ups);
    const auto at = static_cast<int64_t>(down_.quantized_row_size(first));
    for (int64_t row = 0; row < n_rows; ++row) {
        float * gated = gates + row * step_;
        activate(activation_, gated, ups + row * step_, step_);
        down_.quantize_row(gated, n, to + row * row_size() + at);
    }
}

void GatedSteps::multiply(const Linear & l, int64_t expert, const char * x, int64_t n_rows,
                          int64_t first, float * to) const {
    const PackedMatrix & matrix = *l.packed;
    const int64_t tile = matrix.product->tile;
    matrix.product->multiply(matrix.expert(expert), matrix.n_in, matrix.n_out, x, n_rows,
                             first / tile, std::min((first + step_) / tile, matrix.n_tiles()),
                             to - first, step_);
    finish_outputs(l, expert, first, std::min(step_, matrix.n_out - first), to, n_rows, step_);
}

namespace {

// Node of packed_gated(). dst: quantised rows, then scratch for each thread.
class Gated : public CpuNode {
  public:
    Gated(const FeedForwardWeights & w, Activation activation, PackedInput input)
        : steps_(w.gate, w.up, w.down, activation),
          bytes_(static_cast<int64_t>(w.gate.packed->bytes() + w.up.packed->bytes())),
          input_(std::move(input)) {}

    std::vector<const PackedMatrix *> weights() const override { return steps_.weights(); }
    int64_t bytes() const { return whole_lines(input_.n_rows() * steps_.row_size()); }
    int64_t scratch_size() const {
        return input_.scratch_size() + steps_.scratch_size(input_.n_rows());
    }

    void compute(ggml_tensor * dst, int ith, int nth) override {
        auto * to = static_cast<char *>(dst->data);
        char * scratch = to + bytes() + ith * scratch_size();
        const char * x = input_.quantized(dst, scratch);
        scratch += input_.scratch_size();
        const int64_t n = steps_.n_steps(), parts = packed_parts(bytes_, n, nth);
        share_out(parts, is_long_product(bytes_), ith, nth, [&](int64_t part) {
            for (int64_t i = part * n / parts; i < (part + 1) * n / parts; ++i) {
                steps_.run(i, 0, x, input_.n_rows(), scratch, to);
            }
        });
    }

  private:
    GatedSteps steps_;
    int64_t bytes_;
    PackedInput input_;
};

} // namespace

bool gates_packed(const GraphContext & g, const FeedForwardWeights & w) {
    return g.cpu_nodes.n_threads > 0 && w.gate.packed != nullptr && w.up.packed != nullptr &&
           w.down.packed != nullptr &&
           w.gate.packed->product->quantize_row == w.up.packed->product->quantize_row;
}

PackedInput packed_gated(GraphContext & g, const FeedForwardWeights & w, Activation activation,
                         const Rows & x) {
    const PackedInput input(g, *w.gate.packed->product, x);
    auto work = std::make_unique<Gated>(w, activation, input);
    const int64_t bytes = work->bytes() + g.cpu_nodes.n_threads * work->scratch_size();
    ggml_tensor * node = add_cpu_node(g, GGML_TYPE_I8, bytes, 1, input.sources(), std::move(work));
    return {*w.down.packed->product, node, w.down.packed->n_in, input.n_rows()};
}

} // namespace dfl
