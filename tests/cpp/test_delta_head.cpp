// Scan of one Gated DeltaNet head compared with the recurrence in double precision. Tree paths,
// chains cut anywhere and state-only scans must give the same bits.
#include "cpu/isa/kernels.h"

#include "check.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

using namespace dfl;

namespace {

using Floats = std::vector<float>;
using Nodes = std::vector<int32_t>;

struct Head {
    int64_t d, n;
    Floats q, k, v, decay, beta, qk, state;

    Head(const cpu::DeltaHeadKernel & kernel, int64_t d, int64_t n) : d(d), n(n) {
        std::mt19937 random(static_cast<unsigned>(17 * d + n));
        std::normal_distribution<float> normal;
        const auto values = [&](int64_t count) {
            Floats x(count);
            std::generate(x.begin(), x.end(), [&] { return normal(random); });
            return x;
        };
        q = values(n * d);
        k = values(n * d);
        v = values(n * d);
        state = values(d * d);
        for (int64_t i = 0; i < n; ++i) {
            kernel.scale(&q[i * d], d, 0.5f, 1e-6f, &q[i * d]);
            kernel.scale(&k[i * d], d, 1.0f, 1e-6f, &k[i * d]);
            qk.push_back(kernel.dot(&q[i * d], &k[i * d], d));
            decay.push_back(std::exp(-std::fabs(normal(random))));
            beta.push_back(1.0f / (1.0f + std::exp(normal(random))));
        }
    }

    cpu::DeltaScan work(int64_t first, int64_t count) {
        cpu::DeltaScan w = {};
        w.d = d;
        w.n = count;
        w.q = &q[first * d];
        w.k = &k[first * d];
        w.v = &v[first * d];
        w.qk_row = w.v_row = w.out_row = d;
        w.decay = &decay[first];
        w.beta = &beta[first];
        w.gate_row = 1;
        w.qk = &qk[first];
        w.state = state.data();
        return w;
    }
};

Floats scan(const cpu::DeltaHeadKernel & kernel, Head & head, const Nodes & parents) {
    Floats out(head.n * head.d), scratch(kernel.scratch_size(head.d, head.n));
    cpu::DeltaScan work = head.work(0, head.n);
    work.parents = parents.data();
    work.out = out.data();
    kernel.scan(work, scratch.data());
    return out;
}

// Returns the output of the path's last node, and writes the state after that node to `state`.
std::vector<double> expected(const Head & head, const Nodes & path, std::vector<double> & state) {
    const int64_t d = head.d;
    state.assign(head.state.begin(), head.state.end());
    std::vector<double> out(d);
    for (const int32_t node : path) {
        const float * k = &head.k[node * d];
        const float * q = &head.q[node * d];
        for (int64_t j = 0; j < d; ++j) {
            double * row = &state[j * d];
            double on_key = 0;
            for (int64_t i = 0; i < d; ++i) {
                row[i] *= head.decay[node];
                on_key += row[i] * k[i];
            }
            const double change = (head.v[node * d + j] - on_key) * head.beta[node];
            out[j] = 0;
            for (int64_t i = 0; i < d; ++i) {
                row[i] += change * k[i];
                out[j] += row[i] * q[i];
            }
        }
    }
    return out;
}

bool close(const float * found, const std::vector<double> & wanted) {
    double worst = 0, size = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
        worst = std::max(worst, std::fabs(found[i] - wanted[i]));
        size = std::max(size, std::fabs(wanted[i]));
    }
    return worst <= 1e-5 * size;
}

Nodes path_to(const Nodes & parents, int32_t node) {
    Nodes path;
    for (; node >= 0; node = parents[node]) {
        path.insert(path.begin(), node);
    }
    return path;
}

void trees(const cpu::DeltaHeadKernel & kernel, int64_t d) {
    std::mt19937 random(3);
    for (const int64_t n : {1, 2, 7, 30}) {
        Head head(kernel, d, n);
        Nodes parents(n, -1);
        for (int32_t i = 1; i < n; ++i) {
            parents[i] = static_cast<int32_t>(random() % (i + 1)) - 1;
        }
        const Floats out = scan(kernel, head, parents);
        for (int32_t node = 0; node < n; ++node) {
            const Nodes path = path_to(parents, node);
            std::vector<double> state;
            CHECK(close(&out[node * d], expected(head, path, state)));
            // Scan the same path as a chain, and once more for the state only.
            Head alone(head);
            alone.n = static_cast<int64_t>(path.size());
            for (size_t i = 0; i < path.size(); ++i) {
                for (Floats Head::* rows : {&Head::q, &Head::k, &Head::v}) {
                    std::copy_n(&(head.*rows)[path[i] * d], d, &(alone.*rows)[i * d]);
                }
                for (Floats Head::* values : {&Head::decay, &Head::beta, &Head::qk}) {
                    (alone.*values)[i] = (head.*values)[path[i]];
                }
            }
            Floats answers(alone.n * d), last(d * d), promoted = head.state;
            cpu::DeltaScan work = alone.work(0, alone.n);
            work.out = answers.data();
            work.last_state = last.data();
            kernel.scan(work, nullptr);
            CHECK(std::equal(answers.end() - d, answers.end(), &out[node * d]));
            CHECK(close(last.data(), state));
            work.q = nullptr;
            work.state = work.last_state = promoted.data();
            kernel.scan(work, nullptr);
            CHECK(promoted == last);
        }
    }
}

void cut_anywhere(const cpu::DeltaHeadKernel & kernel, int64_t d) {
    Head whole(kernel, d, 13), parts(kernel, d, 13);
    Floats out(13 * d), out_parts(13 * d);
    const auto run = [&](Head & head, int64_t first, int64_t n, Floats & to) {
        cpu::DeltaScan work = head.work(first, n);
        work.last_state = head.state.data();
        work.out = &to[first * d];
        kernel.scan(work, nullptr);
    };
    run(whole, 0, 13, out);
    for (const auto & [first, n] : {std::pair{0, 1}, {1, 4}, {5, 8}}) {
        run(parts, first, n, out_parts);
    }
    CHECK(out == out_parts && whole.state == parts.state);
}

double silu(double x) { return x / (1 + std::exp(-x)); }

void convolutions(const cpu::DeltaHeadKernel & kernel, int64_t d) {
    constexpr int64_t taps = 4, n = 5;
    std::mt19937 random(9);
    std::normal_distribution<float> normal;
    Floats inputs((taps - 1 + n) * d), weights(taps * d), out(n * d);
    for (Floats * x : {&inputs, &weights}) {
        std::generate(x->begin(), x->end(), [&] { return 3 * normal(random); });
    }
    // Convolve a chain, then a tree given by the input row under each tap.
    const Nodes tree = {0, 1, 1, 2, 0, 1, 2, 2, 3, 1, 2, 3, 3, 5, 2, 3, 4, 5, 6, 7};
    for (const int32_t * under : {static_cast<const int32_t *>(nullptr), tree.data()}) {
        cpu::DeltaConvolution work = {};
        work.d = work.past_row = work.u_row = work.out_row = d;
        work.n = n;
        work.d_conv = taps;
        work.past = inputs.data();
        work.u = inputs.data() + (taps - 1) * d;
        work.taps = under;
        work.kernel = weights.data();
        work.out = out.data();
        kernel.convolve(work);
        for (int64_t i = 0; i < n; ++i) {
            std::vector<double> wanted(d);
            for (int64_t c = 0; c < d; ++c) {
                double sum = 0;
                for (int64_t t = 0; t < taps; ++t) {
                    const int64_t row = under != nullptr ? under[t * n + i] : i + t;
                    sum += static_cast<double>(inputs[row * d + c]) * weights[c * taps + t];
                }
                wanted[c] = silu(sum);
            }
            CHECK(close(&out[i * d], wanted));
        }
    }
    // Far from 0, silu(x) is x or 0, and always finite.
    Floats row(d, 1.0f), ones(d, 1.0f), gates(d);
    for (int64_t i = 0; i < d; ++i) {
        gates[i] = (i % 2 ? 1.0f : -1.0f) * static_cast<float>(i) * 20;
    }
    kernel.gate({d, ones.data(), gates.data(), 0.0f, row.data()});
    for (int64_t i = 0; i < d; ++i) {
        CHECK(std::fabs(row[i] - silu(gates[i])) <= 1e-5 * std::max(1.0f, std::fabs(gates[i])));
    }
}

void gates(const cpu::DeltaHeadKernel & kernel) {
    constexpr int64_t n = cpu::DELTA_GATES;
    const float a = -0.7f, bias = 0.3f;
    for (const float width : {0.1f, 3.0f, 40.0f}) {
        float x[n], y[n], decay[n], beta[n];
        for (int64_t i = 0; i < n; ++i) {
            x[i] = width * static_cast<float>(i - n / 2);
            y[i] = -x[i];
        }
        kernel.gates({a, bias, x, y, decay, beta});
        for (int64_t i = 0; i < n; ++i) {
            const double in = static_cast<double>(x[i] + bias);
            const double wanted = a * (std::max(in, 0.0) + std::log1p(std::exp(-std::fabs(in))));
            CHECK(std::fabs(decay[i] - std::exp(wanted)) <= 1e-5 * std::exp(wanted) + 1e-37);
            CHECK(std::fabs(beta[i] - 1.0 / (1.0 + std::exp(static_cast<double>(-y[i])))) <= 1e-6);
        }
    }
}

} // namespace

int main() {
    for (const cpu::Kernels & set : cpu::kernels()) {
        const cpu::DeltaHeadKernel * kernel = set.delta_head;
        if (kernel == nullptr) {
            continue;
        }
        for (const int64_t d : {8, 16, 32, 64, 128, 256, 5, 48, 81}) {
            trees(*kernel, d);
            cut_anywhere(*kernel, d);
            convolutions(*kernel, d);
        }
        gates(*kernel);
    }
}
