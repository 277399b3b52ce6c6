// Products of packed weights: against ggml's own, and against themselves by other rows and tiles.
#include "cpu/packed_product.h"

#include "backend.h"
#include "check.h"

#include <cmath>
#include <ggml-cpp.h>
#include <random>
#include <vector>

using dfl::cpu::packed_product;
using dfl::cpu::PackedProduct;

namespace {

constexpr int64_t N_ROWS = 20;

std::vector<float> noise(int64_t n, std::mt19937 & random) {
    std::normal_distribution<float> normal;
    std::vector<float> values(n);
    for (float & value : values) {
        value = normal(random);
    }
    return values;
}

std::vector<uint8_t> quantized(ggml_type type, const std::vector<float> & values, int64_t n_in) {
    std::vector<uint8_t> rows(ggml_row_size(type, values.size()));
    ggml_quantize_chunk(type, values.data(), rows.data(), 0, values.size() / n_in, n_in, nullptr);
    return rows;
}

// ggml's product on its CPU backend. [n_out, n_rows]
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
        // Rows that quantise oddly: zeros, and a largest value met with both signs.
        std::fill(x.begin(), x.begin() + n_in, 0.0f);
        x[n_in + 3] = -9.0f;
        x[n_in + 7] = 9.0f;
        packed.resize(product.packed_size(n_in, n_out));
        const int64_t n_tiles = (n_out + product.tile - 1) / product.tile;
        product.pack(weights.data(), n_in, n_out, 1, n_tiles, packed.data());
        product.pack(weights.data(), n_in, n_out, 0, 1, packed.data());
    }

    int64_t n_tiles() const { return (n_out + product.tile - 1) / product.tile; }

    // n_rows rows from first on, tiles by `step` at a time; one float of room on either side.
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

void check_unpacked(const Case & c) {
    const size_t size = ggml_row_size(c.product.type, c.n_in);
    std::vector<uint8_t> row(size);
    for (int64_t i = 0; i < c.n_out; ++i) {
        c.product.unpack_row(c.packed.data(), c.n_in, c.n_out, i, row.data());
        CHECK(std::equal(row.begin(), row.end(), c.weights.begin() + i * size));
    }
}

// Both quantise x to the same values and sum exact integers, so only the order of float sums tells
// them apart: 1e-6 of a row's norm at most was seen. Other values of x would be 1e-3 away.
void check_against_ggml(const Case & c) {
    const auto ours = c.multiply(0, N_ROWS, c.n_tiles());
    const auto theirs = product_of_ggml(c.product.type, c.weights, c.n_in, c.n_out, c.x);
    for (int64_t r = 0; r < N_ROWS; ++r) {
        double norm = 0, error = 0;
        for (int64_t i = r * c.n_out; i < (r + 1) * c.n_out; ++i) {
            norm += theirs[i] * theirs[i];
            error += (ours[i] - theirs[i]) * (ours[i] - theirs[i]);
        }
        CHECK(std::sqrt(error) <= 1e-5 * std::sqrt(norm));
        CHECK(r == 0 || norm > 0);
    }
}

void check_same_bits(const Case & c) {
    const auto all = c.multiply(0, N_ROWS, c.n_tiles());
    for (int64_t n_rows = 1; n_rows < N_ROWS; ++n_rows) {
        const int64_t first = N_ROWS - n_rows;
        const auto some = c.multiply(first, n_rows, 1 + n_rows % 3);
        CHECK(std::equal(some.begin(), some.end(), all.begin() + first * c.n_out));
    }
}

void check_product(const PackedProduct & product) {
    const int64_t block = ggml_blck_size(product.type);
    CHECK(product.packed_size(block + 1, 32) == 0);
    CHECK(product.packed_size(block, 0) == 0);
    for (const int64_t n_in : {block, 3 * block, 18 * block}) {
        for (const int64_t n_out : {int64_t{5}, int64_t{64}, int64_t{83}}) {
            const Case c(product, n_in, n_out);
            check_unpacked(c);
            check_against_ggml(c);
            check_same_bits(c);
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
    CHECK(packed_product(GGML_TYPE_F32) == nullptr);
    for (const ggml_type type : {GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1,
                                 GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K}) {
        CHECK(packed_product(type, "none") == nullptr);
        CHECK((packed_product(type) != nullptr) == has_products());
        const PackedProduct * last = nullptr;
        for (const char * at_most : {"avx512vnni", "avxvnni", "avx2"}) {
            const PackedProduct * product = packed_product(type, at_most);
            if (product != nullptr && product != last) {
                CHECK(product->type == type);
                check_product(*product);
            }
            last = product;
        }
    }
    return 0;
}
