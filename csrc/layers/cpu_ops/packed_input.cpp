#include "layers/cpu_ops/packed_input.h"

#include "layers/cpu_ops/float_rows.h"
#include "layers/cpu_ops/graph_context.h"

#include <algorithm>

namespace dfl {

namespace {

// Most bytes of quantised rows to prefetch, so that they stay in the L1 cache during a product.
constexpr int64_t MOST_FETCHED = 1 << 14;

int64_t row_scratch(const Rows & rows) {
    return rows.kind == Rows::Kind::PLAIN ? 0 : whole_lines(rows.width() * sizeof(float));
}

// Node that quantises rows. src: x, norm weight or gate. dst: the rows, then scratch for each
// thread.
class Quantize : public CpuNode {
  public:
    Quantize(const cpu::PackedProduct & product, const Rows & rows)
        : product_(product), rows_(rows) {}

    void compute(ggml_tensor * dst, int ith, int nth) override {
        auto * to = static_cast<char *>(dst->data);
        const int64_t n = rows_.width(), size = product_.quantized_row_size(n);
        const int64_t n_rows = rows_.n_rows();
        char * scratch = to + whole_lines(n_rows * size) + ith * row_scratch(rows_);
        for (int64_t row = ith; row < n_rows; row += nth) {
            product_.quantize_row(
                make_row(rows_, dst->src[0], dst->src[1], row, reinterpret_cast<float *>(scratch)),
                n, to + row * size);
        }
    }

  private:
    const cpu::PackedProduct & product_;
    Rows rows_;
};

} // namespace

// True if each thread quantises all rows faster than it would wait for rows of other threads.
static bool is_quantized_alone(const GraphContext & g, const Rows & rows) {
    constexpr int64_t max_values = 8192; // quantising 8192 values takes about 1 us
    return g.cpu_nodes.n_threads > 0 && rows.width() * rows.n_rows() <= max_values;
}

static std::vector<ggml_tensor *> sources_of(const Rows & rows) {
    return rows.operand != nullptr ? std::vector{rows.x, rows.operand} : std::vector{rows.x};
}

static ggml_tensor * quantizing_node(GraphContext & g, const cpu::PackedProduct & product,
                                     const Rows & rows) {
    for (auto rows_of_node = g.quantized_rows.rbegin(); rows_of_node != g.quantized_rows.rend();
         ++rows_of_node) {
        if (rows_of_node->rows == rows && rows_of_node->quantize_row == product.quantize_row) {
            return rows_of_node->tensor;
        }
    }
    const int64_t bytes =
        whole_lines(rows.n_rows() * product.quantized_row_size(rows.width())) +
        (rows.kind == Rows::Kind::PLAIN ? 0 : g.cpu_nodes.n_threads * row_scratch(rows));
    ggml_tensor * node = add_cpu_node(g, GGML_TYPE_I8, bytes, 1, sources_of(rows),
                                      std::make_unique<Quantize>(product, rows));
    g.quantized_rows.push_back({rows, product.quantize_row, node});
    return node;
}

PackedInput::PackedInput(GraphContext & g, const cpu::PackedProduct & product, const Rows & x)
    : product_(&product), rows_(readable(g, x)), alone_(is_quantized_alone(g, rows_)),
      width_(rows_.width()), n_rows_(rows_.n_rows()),
      sources_(alone_ ? sources_of(rows_) : std::vector{quantizing_node(g, product, rows_)}) {}

PackedInput::PackedInput(const cpu::PackedProduct & product, ggml_tensor * quantized, int64_t width,
                         int64_t n_rows)
    : product_(&product), rows_(quantized), width_(width), n_rows_(n_rows), sources_{quantized} {}

int64_t PackedInput::scratch_size() const {
    const auto size = static_cast<int64_t>(product_->quantized_row_size(width_));
    return alone_ ? whole_lines(n_rows_ * size) + row_scratch(rows_) : 0;
}

const char * PackedInput::quantized(const ggml_tensor * dst, char * scratch) const {
    const ggml_tensor * x = dst->src[0];
    const auto size = static_cast<int64_t>(product_->quantized_row_size(width_));
    if (!alone_) {
        fetch_early(static_cast<const float *>(x->data),
                    std::min(n_rows_ * size, MOST_FETCHED) / static_cast<int64_t>(sizeof(float)));
        return static_cast<const char *>(x->data);
    }
    for (int64_t row = 0; row < n_rows_; ++row) {
        fetch_early(row_of(x, row), x->ne[0]);
    }
    auto * values = reinterpret_cast<float *>(scratch + whole_lines(n_rows_ * size));
    for (int64_t row = 0; row < n_rows_; ++row) {
        product_->quantize_row(make_row(rows_, dst->src[0], dst->src[1], row, values), width_,
                               scratch + row * size);
    }
    return scratch;
}

void finish_outputs(const Linear & l, int64_t expert, int64_t first, int64_t n, float * y,
                    int64_t n_rows, int64_t stride) {
    if (l.scale != nullptr) {
        const float scale = static_cast<const float *>(l.scale->data)[expert];
        for (int64_t row = 0; row < n_rows; ++row) {
            for (int64_t i = 0; i < n; ++i) {
                y[row * stride + i] *= scale;
            }
        }
    }
    if (l.bias != nullptr) {
        const float * bias =
            static_cast<const float *>(l.bias->data) + expert * l.bias->ne[0] + first;
        for (int64_t row = 0; row < n_rows; ++row) {
            for (int64_t i = 0; i < n; ++i) {
                y[row * stride + i] += bias[i];
            }
        }
    }
}

} // namespace dfl
