// Products with packed weights, compared with ggml or with float64 sums, and checked for results
// that do not depend on the number of rows or tiles.
#include "cpu/isa/kernels.h"

#include "check.h"
#include "device/backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <ggml-cpp.h>
#include <random>
#include <vector>

using dfl::cpu::packed_product;
using dfl::cpu::PackedProduct;
using dfl::cpu::product_in_place;

namespace {

constexpr int64_t N_ROWS = 67; // more than a block of unpacked weights multiplies at once

std::vector<float> noise(int64_t n, std::mt19937 & random) {
    std::normal_distribution<float> normal;
    std::vector<float> values(n);
    for (float & value : values) {
        value = normal(random);
    }
    return values;
}

std::vector<uint8_t> quantized(ggml_type type, const std::vector<float> & values, int64_t n_in) {
    std::vector<uint8_t> rows(ggml_row_size(type, n_in) * (values.size() / n_in));
    const std::vector<float> importance(n_in, 1.0f); // importance matrix, required by some types
    ggml_quantize_chunk(type, values.data(), rows.data(), 0, values.size() / n_in, n_in,
                        importance.data());
    return rows;
}

std::vector<float> to_floats(ggml_type type, const uint8_t * row, int64_t n) {
    std::vector<float> values(n);
    if (type == GGML_TYPE_F32) {
        std::memcpy(values.data(), row, n * sizeof(float));
    } else {
        ggml_get_type_traits(type)->to_float(row, values.data(), n);
    }
    return values;
}

// Returns ggml's CPU product, [n_out, n_rows].
std::vector<float> product_of_ggml(ggml_type type, const std::vector<uint8_t> & weights,
                                   int64_t n_in, int64_t n_out, const std::vector<float> & x) {
    dfl::Backend backend(dfl::cpu_device(), 1, {});
    const int64_t n_rows = static_cast<int64_t>(x.size()) / n_in;
    ggml_context_ptr ctx(
        ggml_init({8 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true}));
    ggml_tensor * w = ggml_new_tensor_2d(ctx.get(), type, n_in, n_out);
    ggml_tensor * rows = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, n_in, n_rows);
    ggml_tensor * out = ggml_mul_mat(ctx.get(), w, rows);
    ggml_cgraph * graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, out);
    ggml_backend_buffer_ptr buffer(
        ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), backend.default_buffer_type()));
    ggml_backend_tensor_set(w, weights.data(), 0, ggml_nbytes(w));
    ggml_backend_tensor_set(rows, x.data(), 0, ggml_nbytes(rows));
    backend.compute(graph);
    std::vector<float> dst(n_out * n_rows);
    ggml_backend_tensor_get(out, dst.data(), 0, ggml_nbytes(out));
    return dst;
}

struct Case {
    const PackedProduct & product;
    int64_t n_in, n_out;
    std::vector<uint8_t> weights, packed;
    std::vector<float> x;

    Case(const PackedProduct & product, int64_t n_in, int64_t n_out)
        : product(product), n_in(n_in), n_out(n_out) {
        std::mt19937 random(n_in * 31 + n_out);
        weights = quantized(product.type, noise(n_in * n_out, random), n_in);
        x = noise(n_in * N_ROWS, random);
        // Rows that quantise unusually: all zeros, and a largest magnitude with both signs.
        std::fill(x.begin(), x.begin() + n_in, 0.0f);
        x[n_in + n_in / 7] = -9.0f;
        x[n_in + n_in / 3] = 9.0f;
        packed.resize(product.packed_size(n_in, n_out));
        const int64_t n_tiles = (n_out + product.tile - 1) / product.tile;
        product.pack(weights.data(), n_in, n_out, 1, n_tiles, packed.data());
        product.pack(weights.data(), n_in, n_out, 0, 1, packed.data());
    }

    int64_t n_tiles() const { return (n_out + product.tile - 1) / product.tile; }

    // Multiplies rows [first, first + n_rows), `step` tiles per call, with one spare float per row.
    std::vector<float> multiply(int64_t first, int64_t n_rows, int64_t step) const {
        const size_t x_size = product.quantized_row_size(n_in);
        std::vector<uint8_t> rows(n_rows * x_size);
        for (int64_t r = 0; r < n_rows; ++r) {
            product.quantize_row(x.data() + (first + r) * n_in, n_in, rows.data() + r * x_size);
        }
        const int64_t stride = n_out + 1;
        std::vector<float> dst(n_rows * stride, -1234.5f);
        for (int64_t t = 0; t < n_tiles(); t += step) {
            product.multiply(packed.data(), n_in, n_out, rows.data(), n_rows, t,
                             std::min(t + step, n_tiles()), dst.data(), stride);
        }
        std::vector<float> clipped;
        for (int64_t r = 0; r < n_rows; ++r) {
            CHECK(dst[r * stride + n_out] == -1234.5f);
            clipped.insert(clipped.end(), dst.begin() + r * stride,
                           dst.begin() + r * stride + n_out);
        }
        return clipped;
    }
};

// Our code and ggml's quantise x equally and sum integers exactly, so only the order of float
// sums differs (observed: 1e-6). A different rounding of x would differ by 1e-3.
void check_against_ggml(const Case & c) {
    const auto ours = c.multiply(0, N_ROWS, c.n_tiles());
    const auto theirs = product_of_ggml(c.product.type, c.weights, c.n_in, c.n_out, c.x);
    double norm = 0;
    for (const float value : theirs) {
        norm += double(value) * value;
    }
    CHECK(norm > 0);
    const double typical = std::sqrt(norm / static_cast<double>(theirs.size()));
    for (size_t i = 0; i < theirs.size(); ++i) {
        const double most = static_cast<int64_t>(i) < c.n_out ? 0 : 1e-5 * typical;
        CHECK(std::fabs(ours[i] - theirs[i]) <= most);
    }
}

// A missing or misplaced weight changes a float sum by 1e-3 of the summed magnitudes.
void check_against_float64(const Case & c) {
    const auto ours = c.multiply(0, N_ROWS, c.n_tiles());
    const size_t size = ggml_row_size(c.product.type, c.n_in);
    const bool rounds = c.product.quantized_row_size(c.n_in) < c.n_in * sizeof(float);
    for (int64_t r = 0; r < N_ROWS; ++r) {
        std::vector<float> x(c.x.begin() + r * c.n_in, c.x.begin() + (r + 1) * c.n_in);
        for (float & value : x) { // BF16 kernels round x to BF16
            value = rounds ? ggml_bf16_to_fp32(ggml_fp32_to_bf16(value)) : value;
        }
        for (int64_t i = 0; i < c.n_out; ++i) {
            const auto w = to_floats(c.product.type, c.weights.data() + i * size, c.n_in);
            double sum = 0, magnitude = 0;
            for (int64_t k = 0; k < c.n_in; ++k) {
                sum += double(x[k]) * w[k];
                magnitude += std::fabs(double(x[k]) * w[k]);
            }
            CHECK(std::fabs(ours[r * c.n_out + i] - sum) <= 2e-6 * magnitude);
        }
    }
}

void check_same_bits(const Case & c) {
    const auto all = c.multiply(0, N_ROWS, c.n_tiles());
    for (int64_t n_rows = 1; n_rows < N_ROWS; n_rows += n_rows < 20 ? 1 : 15) {
        const int64_t first = N_ROWS - n_rows;
        const auto some = c.multiply(first, n_rows, 1 + n_rows % 3);
        CHECK(std::equal(some.begin(), some.end(), all.begin() + first * c.n_out));
    }
}

// A non-finite input makes its whole output row non-finite, and no other row.
void check_not_finite(Case c) {
    const auto clean = c.multiply(0, N_ROWS, c.n_tiles());
    for (const float bad : {NAN, -NAN, INFINITY, -INFINITY}) {
        for (int64_t r = 2; r < N_ROWS; ++r) {
            const int64_t first = r % 4 == 3 ? 0 : r * 97 % c.n_in;
            const int64_t n = r % 4 == 3 ? c.n_in : std::min(1 + (r % 4) * r, c.n_in - first);
            std::fill_n(c.x.begin() + r * c.n_in + first, n, bad);
        }
        const auto found = c.multiply(0, N_ROWS, c.n_tiles());
        CHECK(std::equal(clean.begin(), clean.begin() + 2 * c.n_out, found.begin()));
        CHECK(std::none_of(found.begin() + 2 * c.n_out, found.end(),
                           [](float x) { return std::isfinite(x); }));
        std::mt19937 random(c.n_in);
        const auto fresh = noise(c.n_in * (N_ROWS - 2), random);
        std::copy(fresh.begin(), fresh.end(), c.x.begin() + 2 * c.n_in);
    }
}

void check_product(const PackedProduct & product) {
    const int64_t block = product.block;
    CHECK(product.packed_size(block, 0) == 0);
    CHECK(block == 1 || product.packed_size(block + 1, 32) == 0);
    const std::vector<int64_t> widths = block == 1    ? std::vector<int64_t>{1, 7, 33, 100, 576}
                                        : block == 32 ? std::vector<int64_t>{32, 96, 352}
                                                      : std::vector<int64_t>{block, 3 * block};
    // ggml's own dot products are slow to quantise for: test one height only.
    const bool dots = block > 1 && product.in_place;
    const std::vector<int64_t> heights =
        dots ? std::vector<int64_t>{17} : std::vector<int64_t>{1, 7, 17, 83};
    for (const int64_t n_in : widths) {
        for (const int64_t n_out : heights) {
            const Case c(product, n_in, n_out);
            if (block == 1) {
                check_against_float64(c);
            } else {
                check_against_ggml(c);
            }
            check_same_bits(c);
            check_not_finite(c);
        }
    }
}

bool has_products() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return false;
#endif
}

} // namespace

int main() {
    const std::vector<ggml_type> ours = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16,
                                         GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0,
                                         GGML_TYPE_Q5_1, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K,
                                         GGML_TYPE_Q5_K, GGML_TYPE_Q6_K};
    for (const ggml_type type : ours) {
        const PackedProduct * best = packed_product(type);
        CHECK(best->tile == 16 || best->tile == 8);
        CHECK(best->in_place == (ggml_blck_size(type) == 1 || !has_products()));
    }
    int n_types = 0;
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const auto type = static_cast<ggml_type>(i);
        if (packed_product(type) == nullptr) {
            continue;
        }
        ++n_types;
        CHECK(product_in_place(type)->in_place);
        std::vector<dfl::cpu::PackedProducts> lists = {dfl::cpu::ggml_dots()};
        for (const dfl::cpu::Kernels & set : dfl::cpu::kernels()) {
            lists.insert(lists.end(), set.products.begin(), set.products.end());
        }
        for (const dfl::cpu::PackedProducts & products : lists) {
            for (const PackedProduct * product = products.list;
                 product != products.list + products.n; ++product) {
                if (product->type == type) {
                    check_product(*product);
                }
            }
        }
    }
    // Number of float types and of quantised types with a dot product in ggml.
    CHECK(n_types == 28);
    return 0;
}
