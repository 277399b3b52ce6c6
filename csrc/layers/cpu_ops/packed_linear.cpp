#include "layers/cpu_ops/packed_linear.h"

#include "error.h"
#include "layers/cpu_ops/float_rows.h"

#include <algorithm>

namespace dfl {

namespace {

// Node that multiplies several weights with one input. src: sources of the input, then the term to
// add. dst: outputs of all weights side by side, f32 [n_out, n_rows], then scratch by thread.
class Multiply : public CpuNode {
  public:
    Multiply(const std::vector<const Linear *> & weights, PackedInput input)
        : input_(std::move(input)) {
        for (const Linear * weight : weights) {
            weights_.push_back(*weight);
            n_tiles_ += weight->packed->n_tiles();
            n_out_ += weight->packed->n_out;
            bytes_ += static_cast<int64_t>(weight->packed->bytes());
        }
    }

    int64_t n_out() const { return n_out_; }

    std::vector<const PackedMatrix *> weights() const override {
        std::vector<const PackedMatrix *> weights;
        for (const Linear & weight : weights_) {
            weights.push_back(weight.packed);
        }
        return weights;
    }

    void compute(ggml_tensor * dst, int ith, int nth) override {
        auto * to = static_cast<float *>(dst->data);
        char * scratch = static_cast<char *>(dst->data) +
                         whole_lines(n_out_ * input_.n_rows() * sizeof(float)) +
                         ith * input_.scratch_size();
        const char * x = input_.quantized(dst, scratch);
        const int64_t parts = packed_parts(bytes_, n_tiles_, nth);
        share_out(parts, is_long_product(bytes_), ith, nth, [&](int64_t part) {
            multiply(dst, x, part * n_tiles_ / parts, (part + 1) * n_tiles_ / parts, to);
        });
    }

  private:
    // Computes the output tiles [first, last), numbered through all weights in turn.
    void multiply(const ggml_tensor * dst, const char * x, int64_t first, int64_t last,
                  float * to) const {
        const ggml_tensor * added = dst->src[input_.sources().size()];
        int64_t before = 0, at = 0;
        for (const Linear & weight : weights_) {
            const PackedMatrix & matrix = *weight.packed;
            const int64_t begin = std::max(first - before, int64_t{0});
            const int64_t end = std::min(last - before, matrix.n_tiles());
            if (begin < end) {
                const int64_t tile = matrix.product->tile, output = begin * tile;
                const int64_t n = std::min(end * tile, matrix.n_out) - output;
                matrix.product->multiply(matrix.data, matrix.n_in, matrix.n_out, x, input_.n_rows(),
                                         begin, end, to + at, n_out_);
                finish_outputs(weight, 0, output, n, to + at + output, input_.n_rows(), n_out_);
                if (added != nullptr) {
                    add(*added, at + output, n, to);
                }
            }
            before += matrix.n_tiles();
            at += matrix.n_out;
        }
    }

    void add(const ggml_tensor & added, int64_t first, int64_t n, float * to) const {
        for (int64_t row = 0; row < input_.n_rows(); ++row) {
            const float * from = row_of(&added, row) + first;
            float * sums = to + row * n_out_ + first;
            for (int64_t i = 0; i < n; ++i) {
                sums[i] += from[i];
            }
        }
    }

    std::vector<Linear> weights_;
    PackedInput input_;
    int64_t n_tiles_ = 0, n_out_ = 0, bytes_ = 0;
};

} // namespace

static ggml_tensor * joint_product(GraphContext & g, const std::vector<const Linear *> & weights,
                                   const PackedInput & input, ggml_tensor * add) {
    std::vector<ggml_tensor *> src = input.sources();
    auto work = std::make_unique<Multiply>(weights, input);
    const int64_t n_out = work->n_out(), n_rows = input.n_rows();
    if (add != nullptr) {
        DFL_CHECK(add->type == GGML_TYPE_F32 && add->nb[0] == sizeof(float) &&
                      add->ne[0] == n_out && add->ne[1] == n_rows,
                  DFL_STATUS_INTERNAL,
                  "a term of shape [%lld, %lld] and type %s cannot be added to a product of "
                  "shape [%lld, %lld]",
                  (long long)add->ne[0], (long long)add->ne[1], ggml_type_name(add->type),
                  (long long)n_out, (long long)n_rows);
        src.push_back(add);
    }
    const int64_t scratch = g.cpu_nodes.n_threads * input.scratch_size();
    if (scratch == 0) {
        return add_cpu_node(g, GGML_TYPE_F32, n_out, n_rows, src, std::move(work));
    }
    const int64_t bytes = whole_lines(n_out * n_rows * sizeof(float)) + scratch;
    ggml_tensor * all =
        add_cpu_node(g, GGML_TYPE_F32, bytes / sizeof(float), 1, src, std::move(work));
    return ggml_view_2d(g.ctx, all, n_out, n_rows, n_out * sizeof(float), 0);
}

static void check_width(const Linear & l, int64_t width) {
    DFL_CHECK(width == l.packed->n_in, DFL_STATUS_INTERNAL,
              "weights for rows of %lld values cannot be multiplied with rows of %lld",
              (long long)l.packed->n_in, (long long)width);
}

ggml_tensor * packed_linear(GraphContext & g, const Linear & l, const PackedInput & input,
                            ggml_tensor * add) {
    check_width(l, input.width());
    return joint_product(g, {&l}, input, add);
}

ggml_tensor * packed_linear(GraphContext & g, const Linear & l, const Rows & x, ggml_tensor * add) {
    return packed_linear(g, l, PackedInput(g, *l.packed->product, x), add);
}

std::vector<ggml_tensor *>
packed_linears(GraphContext & g, const std::vector<const Linear *> & weights, const Rows & x) {
    const PackedInput input(g, *weights[0]->packed->product, x);
    for (const Linear * weight : weights) {
        check_width(*weight, input.width());
    }
    ggml_tensor * all = joint_product(g, weights, input, nullptr);
    std::vector<ggml_tensor *> outputs;
    size_t at = 0;
    for (const Linear * weight : weights) {
        const int64_t n_out = weight->packed->n_out;
        outputs.push_back(ggml_view_2d(g.ctx, all, n_out, all->ne[1], all->nb[1], at));
        at += n_out * sizeof(float);
    }
    return outputs;
}

} // namespace dfl
