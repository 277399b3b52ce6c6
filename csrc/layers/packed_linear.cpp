#include "layers/packed_linear.h"

#include "error.h"

#include <algorithm>

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

// src: quantised rows -> f32 [n_out, rows].
class Multiply : public CpuNode {
  public:
    explicit Multiply(const PackedMatrix & weight) : weight_(weight) {}

    void compute(ggml_tensor * dst, int ith, int nth) override {
        (void)ith;
        const int64_t tiles = weight_.n_tiles();
        const int64_t parts = n_parts(nth);
        for (int64_t part; (part = shares_.next(parts, nth)) < parts;) {
            weight_.product->multiply(weight_.data, weight_.n_in, weight_.n_out, dst->src[0]->data,
                                      dst->ne[1], part * tiles / parts, (part + 1) * tiles / parts,
                                      static_cast<float *>(dst->data), dst->ne[0]);
        }
    }

  private:
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
    ggml_tensor * rows = add_cpu_node(b, GGML_TYPE_I8, product.quantized_row_size(x->ne[0]),
                                      x->ne[1], {x}, std::make_unique<Quantize>(product));
    b.quantized.push_back({x, product.quantize_row, rows});
    return rows;
}

ggml_tensor * packed_linear(Build & b, const PackedMatrix & weight, ggml_tensor * x) {
    DFL_CHECK(x->ne[0] == weight.n_in, DFL_STATUS_INTERNAL,
              "weights for %lld inputs multiplied with %lld", (long long)weight.n_in,
              (long long)x->ne[0]);
    return add_cpu_node(b, GGML_TYPE_F32, weight.n_out, x->ne[1],
                        {quantized(b, *weight.product, x)}, std::make_unique<Multiply>(weight));
}

} // namespace dfl
