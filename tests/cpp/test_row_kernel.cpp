// Operations on rows of floats, compared with double precision.
#include "cpu/isa/kernels.h"

#include "check.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

using namespace dfl;

namespace {

using Floats = std::vector<float>;

std::mt19937 random_bits(5);

Floats values(int64_t n, float width = 3.0f) {
    std::normal_distribution<float> normal(0, width);
    Floats x(n);
    std::generate(x.begin(), x.end(), [&] { return normal(random_bits); });
    return x;
}

bool close(double a, double b) { return std::fabs(a - b) <= 2e-6 * (1.0 + std::fabs(b)); }

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

double norm_of(const Floats & x, double eps) {
    double sum = 0;
    for (const float v : x) {
        sum += static_cast<double>(v) * v;
    }
    return 1.0 / std::sqrt(sum / static_cast<double>(x.size()) + eps);
}

void check_any(const cpu::RowKernel & kernel, int64_t n) {
    const Floats x = values(n), y = values(n, 30.0f);
    Floats to(n + 1, 7.0f);
    kernel.norm(x.data(), n, y.data(), 1e-5f, to.data());
    for (int64_t i = 0; i < n; ++i) {
        CHECK(close(to[i], x[i] * norm_of(x, 1e-5) * y[i]));
    }
    CHECK(to[n] == 7.0f);
    std::vector<uint16_t> halves(n + 1, 7);
    kernel.to_half(x.data(), n, halves.data());
    for (int64_t i = 0; i < n; ++i) {
        CHECK(halves[i] == ggml_fp32_to_fp16(x[i]));
    }
    CHECK(halves[n] == 7);
}

// Checks the logit soft cap, from 1e-6 of its range to full saturation.
void check_cap(const cpu::RowKernel & kernel, int64_t n) {
    constexpr float cap = 30.0f;
    for (const float width : {1e-5f, 0.1f, 15.0f, 40.0f, 3000.0f}) {
        Floats x = values(n, width), to(n + 1, 7.0f);
        kernel.cap(x.data(), n, 1.0f / cap, cap, to.data());
        for (int64_t i = 0; i < n; ++i) {
            const double wanted = cap * std::tanh(x[i] / static_cast<double>(cap));
            CHECK(std::fabs(to[i] - wanted) <= 5e-7 * std::fabs(wanted));
        }
        CHECK(to[n] == 7.0f);
        // A value must give the same bits alone, in a row, and in place.
        for (int64_t i = 0; i < n; ++i) {
            float alone = 0;
            kernel.cap(&x[i], 1, 1.0f / cap, cap, &alone);
            CHECK(alone == to[i]);
        }
        kernel.cap(x.data(), n, 1.0f / cap, cap, x.data());
        CHECK(std::equal(x.begin(), x.end(), to.begin()));
    }
    Floats odd = {NAN, INFINITY, -INFINITY, 0.0f};
    kernel.cap(odd.data(), 4, 1.0f / cap, cap, odd.data());
    CHECK(std::isnan(odd[0]) && odd[1] == cap && odd[2] == -cap && odd[3] == 0.0f);
}

void check_rows(const cpu::RowKernel & kernel, int64_t n) {
    const Floats x = values(n), y = values(n, 30.0f);
    Floats to(n);
    kernel.swiglu(y.data(), x.data(), n, to.data());
    for (int64_t i = 0; i < n; ++i) {
        CHECK(close(to[i], y[i] * sigmoid(y[i]) * x[i]));
    }
    kernel.gated(x.data(), y.data(), n, to.data());
    for (int64_t i = 0; i < n; ++i) {
        CHECK(close(to[i], x[i] * sigmoid(y[i])));
    }
    check_any(kernel, n);
}

void check_turns(const cpu::RowKernel & kernel, int64_t d, int64_t n_rotated, bool pairs,
                 bool normed) {
    const Floats x = values(d), weight = values(d), angles = values(n_rotated / 2);
    Floats rotated(n_rotated), to(d);
    std::vector<double> wanted(d);
    for (int64_t i = 0; i < d; ++i) {
        wanted[i] = normed ? x[i] * norm_of(x, 1e-6) * weight[i] : x[i];
    }
    for (int64_t i = 0; i < n_rotated / 2; ++i) {
        const int64_t a = pairs ? 2 * i : i, b = pairs ? 2 * i + 1 : i + n_rotated / 2;
        rotated[a] = std::cos(angles[i]);
        rotated[b] = std::sin(angles[i]);
        const double first = wanted[a], second = wanted[b];
        wanted[a] = first * rotated[a] - second * rotated[b];
        wanted[b] = first * rotated[b] + second * rotated[a];
    }
    kernel.rotate(
        {x.data(), d, normed ? weight.data() : nullptr, 1e-6f, rotated.data(), n_rotated, pairs},
        to.data());
    for (int64_t i = 0; i < d; ++i) {
        CHECK(close(to[i], wanted[i]));
    }
}

void check_choices(const cpu::RowKernel & kernel, int64_t n) {
    Floats x = values(n);
    const int64_t best = std::max_element(x.begin(), x.end()) - x.begin();
    CHECK(kernel.first_largest(x.data(), n) == best);
    double sum = 0;
    for (const float v : x) {
        sum += std::exp(static_cast<double>(v));
    }
    CHECK(close(kernel.log_sum_exp(x.data(), n), std::log(sum)));
    // first_largest() returns the first of equal maxima, and ignores NaNs.
    x[n / 2] = x[n - 1] = 99.0f;
    x[0] = n > 2 ? NAN : x[0];
    CHECK(kernel.first_largest(x.data(), n) == n / 2);
    std::fill(x.begin(), x.end(), NAN);
    CHECK(kernel.first_largest(x.data(), n) == n);
    CHECK(std::isnan(kernel.log_sum_exp(x.data(), n)));
    std::fill(x.begin(), x.end(), -INFINITY);
    CHECK(kernel.first_largest(x.data(), n) == 0);
    CHECK(std::isnan(kernel.log_sum_exp(x.data(), n)));
}

uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// Checks the operations of the sampler: block maxima, mass below the maximum, hashes.
void check_draws(const cpu::RowKernel & kernel, int64_t n) {
    Floats x = values(n);
    const int64_t n_blocks = (n + cpu::BLOCK - 1) / cpu::BLOCK;
    Floats most(n_blocks + 1, 7.0f);
    CHECK(kernel.maxima(x.data(), n, most.data()));
    double sum = 0;
    const float best = *std::max_element(x.begin(), x.end());
    for (int64_t i = 0; i < n_blocks; ++i) {
        const auto end = x.begin() + std::min(n, (i + 1) * cpu::BLOCK);
        CHECK(most[i] == *std::max_element(x.begin() + i * cpu::BLOCK, end));
    }
    CHECK(most[n_blocks] == 7.0f);
    for (const float v : x) {
        sum += std::exp(static_cast<double>(v) - best);
    }
    CHECK(close(kernel.sum_exp(x.data(), n, best) / sum, 1.0));
    for (const float bad : {NAN, INFINITY}) {
        for (const int64_t at : {int64_t{0}, n / 2, n - 1}) {
            Floats spoiled = x;
            spoiled[at] = bad;
            CHECK(!kernel.maxima(spoiled.data(), n, most.data()));
        }
    }
    std::fill(x.begin(), x.end(), -INFINITY);
    CHECK(kernel.maxima(x.data(), n, most.data()));
    CHECK(std::count(most.begin(), most.end() - 1, -INFINITY) == n_blocks);
    x[n / 2] = 4.0f;
    CHECK(kernel.sum_exp(x.data(), n, 4.0f) == 1.0);
    std::vector<uint64_t> bits(n + 1, 7);
    const uint64_t top = kernel.noise(12345, 1000, n, bits.data());
    for (int64_t i = 0; i < n; ++i) {
        CHECK(bits[i] == mix(12345 + (1001 + (uint64_t)i) * 0x9E3779B97F4A7C15u) >> 12);
    }
    CHECK(top == *std::max_element(bits.begin(), bits.end() - 1));
    CHECK(bits[n] == 7);
}

void check_kernel(const cpu::RowKernel & kernel) {
    for (const int64_t n : {16, 32, 64, 96, 1536}) {
        check_rows(kernel, n);
    }
    for (const int64_t n : {1, 15, 17, 40, 100}) {
        check_any(kernel, n);
        check_cap(kernel, n);
    }
    for (const bool pairs : {false, true}) {
        for (const bool normed : {false, true}) {
            check_turns(kernel, 64, 64, pairs, normed);
            check_turns(kernel, 64, 20, pairs, normed);
            check_turns(kernel, 256, 64, pairs, normed);
            check_turns(kernel, 20, 10, pairs, normed);
            check_turns(kernel, 81, 36, pairs, normed);
        }
    }
    for (const int64_t n : {1, 7, 16, 511, 512, 513, 4096, 10007}) {
        check_choices(kernel, n);
        check_draws(kernel, n);
    }
}

} // namespace

int main() {
    for (const cpu::Kernels & set : cpu::kernels()) {
        if (set.rows != nullptr) {
            check_kernel(*set.rows);
        }
    }
}
