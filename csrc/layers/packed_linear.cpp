#include "layers/packed_linear.h"

#include "error.h"
#include "layers/float_rows.h"
#include "layers/packed_rows.h"

#include <algorithm>

namespace dfl {

namespace {

constexpr int64_t LINE = 64; // bytes that threads must not share

int64_t lines(int64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

// Bytes in which a thread makes a row.
int64_t row_scratch(const PackedRows & rows) {
    return rows.kind == PackedRows::Kind::PLAIN ? 0 : lines(rows.width() * sizeof(float));
}

// Rows of x as a product wants them, [quantized_row_size(n), n_rows], then scratch for each thread.
// src: x and what it is made with.
class Quantize : public CpuNode {
  public:
    Quantize(const cpu::PackedProduct & product, const PackedRows & rows)
        : product_(product), rows_(rows) {}

    void compute(ggml_tensor * dst, int ith, int nth) override {
        auto * to = static_cast<char *>(dst->data);
        const int64_t n = rows_.width(), size = product_.quantized_row_size(n);
        const int64_t n_rows = rows_.n_rows();
        char * scratch = to + lines(n_rows * size) + ith * row_scratch(rows_);
        for (int64_t row = ith; row < n_rows; row += nth) {
            product_.quantize_row(
                make_row(rows_, dst->src[0], dst->src[1], row, reinterpret_cast<float *>(scratch)),
                n, to + row * size);
        }
    }

  private:
    const cpu::PackedProduct & product_;
    PackedRows rows_;
};

// Products of some weights with the same rows, their outputs side by side: f32
// [n_out of all, n_rows], then scratch for each thread. src: quantised rows, or x and what it is
// made with, which each thread then quantises for itself; behind them, for a sum, what is added.
class Multiply : public CpuNode {
  public:
    Multiply(std::vector<const PackedMatrix *> weights, const PackedRows & rows, bool quantises,
             int n_src)
        : weights_(std::move(weights)), rows_(rows), quantises_(quantises), n_src_(n_src) {
        for (const PackedMatrix * weight : weights_) {
            n_tiles_ += weight->n_tiles();
            n_out_ += weight->n_out;
            bytes_ += static_cast<int64_t>(weight->bytes());
        }
    }

    int64_t n_out() const { return n_out_; }

    // Bytes of a thread.
    int64_t scratch_size() const {
        return quantises_ ? lines(rows_.n_rows() * row_size()) + row_scratch(rows_) : 0;
    }

    void compute(ggml_tensor * dst, int ith, int nth) override {
        const char * x = quantises_ ? quantized(dst, ith) : static_cast<char *>(dst->src[0]->data);
        auto * to = static_cast<float *>(dst->data);
        const int64_t parts = n_parts(nth);
        shares_.share_out(parts, is_long(), ith, nth, [&](int64_t part) {
            multiply(dst, x, part * n_tiles_ / parts, (part + 1) * n_tiles_ / parts, to);
        });
    }

  private:
    int64_t row_size() const {
        return static_cast<int64_t>(weights_[0]->product->quantized_row_size(rows_.width()));
    }

    const char * quantized(const ggml_tensor * dst, int ith) const {
        const int64_t n_rows = rows_.n_rows(), size = row_size();
        char * to = static_cast<char *>(dst->data) + lines(n_out_ * n_rows * sizeof(float)) +
                    ith * scratch_size();
        auto * scratch = reinterpret_cast<float *>(to + lines(n_rows * size));
        for (int64_t row = 0; row < n_rows; ++row) {
            weights_[0]->product->quantize_row(
                make_row(rows_, dst->src[0], dst->src[1], row, scratch), rows_.width(),
                to + row * size);
        }
        return to;
    }

    // Tiles [first, last) of all weights' tiles.
    void multiply(const ggml_tensor * dst, const char * x, int64_t first, int64_t last,
                  float * to) const {
        int64_t before = 0, at = 0; // tiles and outputs of the weights passed
        for (const PackedMatrix * weight : weights_) {
            const int64_t begin = std::max(first - before, int64_t{0});
            const int64_t end = std::min(last - before, weight->n_tiles());
            if (begin < end) {
                const cpu::PackedProduct & product = *weight->product;
                product.multiply(weight->data, weight->n_in, weight->n_out, x, rows_.n_rows(),
                                 begin, end, to + at, n_out_);
                if (dst->src[n_src_] != nullptr) {
                    add(dst->src[n_src_], at + begin * product.tile,
                        at + std::min(end * product.tile, weight->n_out), to);
                }
            }
            before += weight->n_tiles();
            at += weight->n_out;
        }
    }

    // Outputs [first, last).
    void add(const ggml_tensor * more, int64_t first, int64_t last, float * to) const {
        for (int64_t row = 0; row < rows_.n_rows(); ++row) {
            const float * from = row_of(more, row);
            for (int64_t i = first; i < last; ++i) {
                to[row * n_out_ + i] += from[i];
            }
        }
    }

    // Threads that take turns fetching parts of less have spent as long on fetching.
    bool is_long() const { return bytes_ >= 1 << 20; }

    // Enough for an even end.
    int64_t n_parts(int nth) const {
        constexpr int64_t parts_per_thread = 16, least_bytes = 1 << 16;
        if (nth == 1 || !is_long()) {
            return std::min<int64_t>(nth, n_tiles_);
        }
        return std::min({parts_per_thread * nth, bytes_ / least_bytes, n_tiles_});
    }

    std::vector<const PackedMatrix *> weights_;
    PackedRows rows_;
    bool quantises_;
    int n_src_;
    int64_t n_tiles_ = 0, n_out_ = 0, bytes_ = 0;
    Shares shares_;
};

} // namespace

// Whether each thread had better quantise all rows than wait for the others to have done theirs.
static bool quantises_alone(const Build & b, const PackedRows & rows) {
    constexpr int64_t most = 8192; // values, which take about a microsecond
    return b.cpu_nodes.n_threads > 0 && rows.width() * rows.n_rows() <= most;
}

static std::vector<ggml_tensor *> sources(const PackedRows & rows) {
    return rows.with != nullptr ? std::vector{rows.x, rows.with} : std::vector{rows.x};
}

static ggml_tensor * quantized(Build & b, const cpu::PackedProduct & product, ggml_tensor * x,
                               const PackedRows & rows) {
    for (const QuantizedInput & known : b.quantized) {
        if (known.x == x && known.quantize_row == product.quantize_row) {
            return known.rows;
        }
    }
    const int64_t bytes =
        lines(rows.n_rows() * product.quantized_row_size(rows.width())) +
        (rows.kind == PackedRows::Kind::PLAIN ? 0 : b.cpu_nodes.n_threads * row_scratch(rows));
    ggml_tensor * node = add_cpu_node(b, GGML_TYPE_I8, bytes, 1, sources(rows),
                                      std::make_unique<Quantize>(product, rows));
    b.quantized.push_back({x, product.quantize_row, node});
    return node;
}

// The products of all weights, [n_out of all, n_rows].
static ggml_tensor * joint_product(Build & b, std::vector<const PackedMatrix *> weights,
                                   ggml_tensor * x) {
    const cpu::PackedProduct & product = *weights[0]->product;
    const PackedRows rows = packed_rows(b, x);
    const bool alone = quantises_alone(b, rows);
    const std::vector<ggml_tensor *> src =
        alone ? sources(rows) : std::vector{quantized(b, product, x, rows)};
    const int n_src = static_cast<int>(src.size());
    auto work = std::make_unique<Multiply>(std::move(weights), rows, alone, n_src);
    const int64_t n_out = work->n_out(), n_rows = rows.n_rows();
    const int64_t scratch = b.cpu_nodes.n_threads * work->scratch_size();
    const int64_t bytes = lines(n_out * n_rows * sizeof(float)) + scratch;
    ggml_tensor * node = nullptr;
    ggml_tensor * result = nullptr;
    if (scratch > 0) {
        node = add_cpu_node(b, GGML_TYPE_F32, bytes / sizeof(float), 1, src, std::move(work));
        result = ggml_view_2d(b.ctx, node, n_out, n_rows, n_out * sizeof(float), 0);
    } else {
        node = result = add_cpu_node(b, GGML_TYPE_F32, n_out, n_rows, src, std::move(work));
    }
    b.last_product = {result, node, n_src};
    return result;
}

ggml_tensor * packed_linear(Build & b, const PackedMatrix & weight, ggml_tensor * x) {
    DFL_CHECK(x->ne[0] == weight.n_in, DFL_STATUS_INTERNAL,
              "weights for %lld inputs multiplied with %lld", (long long)weight.n_in,
              (long long)x->ne[0]);
    return joint_product(b, {&weight}, x);
}

std::vector<ggml_tensor *>
packed_linears(Build & b, const std::vector<const PackedMatrix *> & weights, ggml_tensor * x) {
    const bool alike = std::all_of(weights.begin(), weights.end(), [&](const PackedMatrix * w) {
        return w != nullptr && w->product->quantize_row == weights[0]->product->quantize_row &&
               w->n_in == x->ne[0];
    });
    if (weights.size() < 2 || !alike) {
        return {};
    }
    ggml_tensor * all = joint_product(b, weights, x);
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
