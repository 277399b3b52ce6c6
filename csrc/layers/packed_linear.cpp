#include "layers/packed_linear.h"

#include "error.h"

#include <algorithm>
#include <cmath>

namespace dfl {

namespace {

// Rows of x as a product wants them. src: f32 [n, rows] -> i8 [quantized_row_size(n), rows].
class Quantize : public CpuNode {
  public:
    explicit Quantize(const cpu::PackedProduct & product) : product_(product) {}

    void compute(ggml_tensor * dst, int ith, int nth) override {
        const ggml_tensor * x = dst->src[0];
        for (int64_t row = ith; row < x->ne[1]; row += nth) {
            product_.quantize_row(
                reinterpret_cast<const float *>(static_cast<char *>(x->data) + row * x->nb[1]),
                x->ne[0], static_cast<char *>(dst->data) + row * dst->nb[1]);
        }
    }

  private:
    const cpu::PackedProduct & product_;
};

// The same of x normed and weighted. src: f32 [n, rows] and [n]. Behind the rows lies a row of
// floats for each thread.
class NormAndQuantize : public CpuNode {
  public:
    NormAndQuantize(const cpu::PackedProduct & product, float eps) : product_(product), eps_(eps) {}

    // Rows of dst that hold a thread's floats.
    static int64_t scratch_rows(const cpu::PackedProduct & product, int64_t n) {
        const int64_t bytes = product.quantized_row_size(n);
        return (n * static_cast<int64_t>(sizeof(float)) + bytes - 1) / bytes;
    }

    void compute(ggml_tensor * dst, int ith, int nth) override {
        const ggml_tensor * x = dst->src[0];
        const auto * weight = static_cast<const float *>(dst->src[1]->data);
        const int64_t n = x->ne[0];
        auto * to = static_cast<char *>(dst->data);
        auto * normed = reinterpret_cast<float *>(
            to + (x->ne[1] + ith * scratch_rows(product_, n)) * dst->nb[1]);
        for (int64_t row = ith; row < x->ne[1]; row += nth) {
            const auto * from = reinterpret_cast<const float *>(static_cast<const char *>(x->data) +
                                                                row * x->nb[1]);
            const float by = 1.0f / std::sqrt(mean_of_squares(from, n) + eps_);
            for (int64_t i = 0; i < n; ++i) {
                normed[i] = from[i] * by * weight[i];
            }
            product_.quantize_row(normed, n, to + row * dst->nb[1]);
        }
    }

  private:
    static float mean_of_squares(const float * x, int64_t n) {
        constexpr int64_t lanes = 16; // sums that do not wait for each other
        float sums[lanes] = {};
        for (int64_t i = 0; i + lanes <= n; i += lanes) {
            for (int64_t lane = 0; lane < lanes; ++lane) {
                sums[lane] += x[i + lane] * x[i + lane];
            }
        }
        double sum = 0;
        for (const float lane : sums) {
            sum += lane;
        }
        for (int64_t i = n / lanes * lanes; i < n; ++i) {
            sum += static_cast<double>(x[i]) * x[i];
        }
        return static_cast<float>(sum / static_cast<double>(n));
    }

    const cpu::PackedProduct & product_;
    float eps_;
};

// src: quantised rows, and for a sum what is added, f32 [n_out, rows] -> f32 [n_out, rows].
class Multiply : public CpuNode {
  public:
    explicit Multiply(const PackedMatrix & weight) : weight_(weight) {}

    void compute(ggml_tensor * dst, int ith, int nth) override {
        (void)ith;
        const int64_t tiles = weight_.n_tiles();
        const int64_t parts = n_parts(nth);
        for (int64_t part; (part = shares_.next(parts, nth)) < parts;) {
            const int64_t first = part * tiles / parts, last = (part + 1) * tiles / parts;
            weight_.product->multiply(weight_.data, weight_.n_in, weight_.n_out, dst->src[0]->data,
                                      dst->ne[1], first, last, static_cast<float *>(dst->data),
                                      dst->ne[0]);
            if (dst->src[1] != nullptr) {
                const int64_t tile = weight_.product->tile;
                add(dst, first * tile, std::min(last * tile, weight_.n_out));
            }
        }
    }

  private:
    // Outputs [first, last).
    static void add(ggml_tensor * dst, int64_t first, int64_t last) {
        const ggml_tensor * more = dst->src[1];
        for (int64_t row = 0; row < dst->ne[1]; ++row) {
            auto * to =
                reinterpret_cast<float *>(static_cast<char *>(dst->data) + row * dst->nb[1]);
            const auto * from = reinterpret_cast<const float *>(
                static_cast<const char *>(more->data) + row * more->nb[1]);
            for (int64_t i = first; i < last; ++i) {
                to[i] += from[i];
            }
        }
    }

    // Enough for an even end, and each long enough to be worth fetching.
    int64_t n_parts(int nth) const {
        constexpr int64_t parts_per_thread = 16, least_bytes = 1 << 15;
        const int64_t worth = weight_.bytes() / least_bytes;
        const int64_t most = std::min<int64_t>(parts_per_thread * nth, weight_.n_tiles());
        return nth == 1 ? 1 : std::clamp<int64_t>(worth, std::min<int64_t>(nth, most), most);
    }

    const PackedMatrix & weight_;
    Shares shares_;
};

} // namespace

// Whether x is what rms_norm() returns, of rows that lie as floats.
static bool is_weighted_norm(const ggml_tensor * x) {
    if (x->op != GGML_OP_MUL || x->src[0]->op != GGML_OP_RMS_NORM) {
        return false;
    }
    const ggml_tensor *rows = x->src[0]->src[0], *weight = x->src[1];
    return ggml_is_matrix(rows) && rows->nb[0] == sizeof(float) && weight->type == GGML_TYPE_F32 &&
           ggml_nelements(weight) == rows->ne[0];
}

static ggml_tensor * quantized(Build & b, const cpu::PackedProduct & product, ggml_tensor * x) {
    for (const QuantizedInput & known : b.quantized) {
        if (known.x == x && known.quantize_row == product.quantize_row) {
            return known.rows;
        }
    }
    DFL_CHECK(x->type == GGML_TYPE_F32 && ggml_is_matrix(x) && x->nb[0] == sizeof(float),
              DFL_STATUS_INTERNAL, "a product of a [%lld, %lld, %lld] of type %s",
              (long long)x->ne[0], (long long)x->ne[1], (long long)x->ne[2],
              ggml_type_name(x->type));
    const int64_t size = product.quantized_row_size(x->ne[0]);
    ggml_tensor * rows = nullptr;
    // Whose own nodes then run only if something else wants them. Its scratch is counted for graphs
    // of the CPU alone.
    if (b.cpu_nodes.n_threads > 0 && is_weighted_norm(x)) {
        const int64_t scratch =
            b.cpu_nodes.n_threads * NormAndQuantize::scratch_rows(product, x->ne[0]);
        rows =
            add_cpu_node(b, GGML_TYPE_I8, size, x->ne[1] + scratch, {x->src[0]->src[0], x->src[1]},
                         std::make_unique<NormAndQuantize>(product, b.hp.eps));
    } else {
        rows =
            add_cpu_node(b, GGML_TYPE_I8, size, x->ne[1], {x}, std::make_unique<Quantize>(product));
    }
    b.quantized.push_back({x, product.quantize_row, rows});
    return rows;
}

ggml_tensor * packed_linear(Build & b, const PackedMatrix & weight, ggml_tensor * x) {
    DFL_CHECK(x->ne[0] == weight.n_in, DFL_STATUS_INTERNAL,
              "weights for %lld inputs multiplied with %lld", (long long)weight.n_in,
              (long long)x->ne[0]);
    ggml_tensor * product =
        add_cpu_node(b, GGML_TYPE_F32, weight.n_out, x->ne[1], {quantized(b, *weight.product, x)},
                     std::make_unique<Multiply>(weight));
    b.last_product = product;
    return product;
}

ggml_tensor * add_residual(Build & b, ggml_tensor * y, ggml_tensor * x) {
    const bool joins = y == b.last_product && y->src[1] == nullptr && ggml_are_same_shape(x, y) &&
                       x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float);
    if (!joins) {
        return ggml_add(b.ctx, y, x);
    }
    y->src[1] = x;
    return y;
}

} // namespace dfl
