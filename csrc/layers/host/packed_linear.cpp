#include "layers/host/packed_linear.h"

#include "error.h"
#include "layers/host/float_rows.h"
#include "layers/host/packed_input.h"
#include "layers/host/packed_shares.h"

#include <algorithm>

namespace dfl {

namespace {

// Products of some weights with the same rows, their outputs side by side: f32
// [n_out of all, n_rows], then scratch for each thread. src: the input's, and behind them, for a
// sum, what is added.
class Multiply : public CpuNode {
  public:
    Multiply(std::vector<const PackedMatrix *> weights, PackedInput input)
        : weights_(std::move(weights)), input_(std::move(input)) {
        for (const PackedMatrix * weight : weights_) {
            n_tiles_ += weight->n_tiles();
            n_out_ += weight->n_out;
            bytes_ += static_cast<int64_t>(weight->bytes());
        }
    }

    int64_t n_out() const { return n_out_; }

    void compute(ggml_tensor * dst, int ith, int nth) override {
        auto * to = static_cast<float *>(dst->data);
        char * scratch = static_cast<char *>(dst->data) +
                         whole_lines(n_out_ * input_.n_rows() * sizeof(float)) +
                         ith * input_.scratch_size();
        const char * x = input_.quantized(dst, scratch);
        const int64_t parts = packed_parts(bytes_, n_tiles_, nth);
        shares_.share_out(parts, is_long_product(bytes_), ith, nth, [&](int64_t part) {
            multiply(dst, x, part * n_tiles_ / parts, (part + 1) * n_tiles_ / parts, to);
        });
    }

  private:
    // Tiles [first, last) of all weights' tiles.
    void multiply(const ggml_tensor * dst, const char * x, int64_t first, int64_t last,
                  float * to) const {
        const ggml_tensor * more = dst->src[input_.sources().size()];
        int64_t before = 0, at = 0; // tiles and outputs of the weights passed
        for (const PackedMatrix * weight : weights_) {
            const int64_t begin = std::max(first - before, int64_t{0});
            const int64_t end = std::min(last - before, weight->n_tiles());
            if (begin < end) {
                const cpu::PackedProduct & product = *weight->product;
                product.multiply(weight->data, weight->n_in, weight->n_out, x, input_.n_rows(),
                                 begin, end, to + at, n_out_);
                if (more != nullptr) {
                    add(more, at + begin * product.tile,
                        at + std::min(end * product.tile, weight->n_out), to);
                }
            }
            before += weight->n_tiles();
            at += weight->n_out;
        }
    }

    // Outputs [first, last).
    void add(const ggml_tensor * more, int64_t first, int64_t last, float * to) const {
        for (int64_t row = 0; row < input_.n_rows(); ++row) {
            const float * from = row_of(more, row);
            for (int64_t i = first; i < last; ++i) {
                to[row * n_out_ + i] += from[i];
            }
        }
    }

    std::vector<const PackedMatrix *> weights_;
    PackedInput input_;
    int64_t n_tiles_ = 0, n_out_ = 0, bytes_ = 0;
};

} // namespace

// The products of all weights, [n_out of all, n_rows].
static ggml_tensor * joint_product(Build & b, std::vector<const PackedMatrix *> weights,
                                   const PackedInput & input) {
    const std::vector<ggml_tensor *> & src = input.sources();
    auto work = std::make_unique<Multiply>(std::move(weights), input);
    const int64_t n_out = work->n_out(), n_rows = input.n_rows();
    const int64_t scratch = b.cpu_nodes.n_threads * input.scratch_size();
    const int64_t bytes = whole_lines(n_out * n_rows * sizeof(float)) + scratch;
    ggml_tensor * node = nullptr;
    ggml_tensor * result = nullptr;
    if (scratch > 0) {
        node = add_cpu_node(b, GGML_TYPE_F32, bytes / sizeof(float), 1, src, std::move(work));
        result = ggml_view_2d(b.ctx, node, n_out, n_rows, n_out * sizeof(float), 0);
    } else {
        node = result = add_cpu_node(b, GGML_TYPE_F32, n_out, n_rows, src, std::move(work));
    }
    b.last_product = {result, node, static_cast<int>(src.size())};
    return result;
}

ggml_tensor * packed_linear(Build & b, const PackedMatrix & weight, ggml_tensor * x) {
    DFL_CHECK(x->ne[0] == weight.n_in, DFL_STATUS_INTERNAL,
              "weights for %lld inputs multiplied with %lld", (long long)weight.n_in,
              (long long)x->ne[0]);
    return joint_product(b, {&weight}, PackedInput(b, *weight.product, x));
}

ggml_tensor * packed_linear(Build & b, const PackedMatrix & weight, const PackedInput & input) {
    return joint_product(b, {&weight}, input);
}

std::vector<ggml_tensor *>
packed_linears(Build & b, const std::vector<const PackedMatrix *> & weights, ggml_tensor * x) {
    const bool alike = std::all_of(weights.begin(), weights.end(), [&](const PackedMatrix * w) {
        return w->product->quantize_row == weights[0]->product->quantize_row && w->n_in == x->ne[0];
    });
    if (weights.size() < 2 || !alike) {
        return {};
    }
    ggml_tensor * all = joint_product(b, weights, PackedInput(b, *weights[0]->product, x));
    std::vector<ggml_tensor *> found;
    size_t at = 0;
    for (const PackedMatrix * weight : weights) {
        found.push_back(ggml_view_2d(b.ctx, all, weight->n_out, all->ne[1], all->nb[1], at));
        at += weight->n_out * sizeof(float);
    }
    return found;
}

ggml_tensor * add_residual(Build & b, ggml_tensor * y, ggml_tensor * x) {
    const Product & product = b.last_product;
    const bool joins = y == product.result && product.node->src[product.n_src] == nullptr &&
                       ggml_are_same_shape(x, y) && x->type == GGML_TYPE_F32 &&
                       x->nb[0] == sizeof(float);
    if (!joins) {
        return ggml_add(b.ctx, y, x);
    }
    product.node->src[product.n_src] = x;
    return y;
}

} // namespace dfl
