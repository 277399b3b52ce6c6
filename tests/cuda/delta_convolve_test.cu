// Compares the convolution of Gated DeltaNet with sums in float64 along the nodes' chains of
// parents, and the stored updates with the inputs.
#include "cuda/delta_convolve.h"
#include "support.h"

#include <cmath>
#include <limits>

namespace {

using namespace dfl::cuda;
using namespace kernel_test;

constexpr double MAX_ERROR = 1e-5;

struct Case {
    Shape shape;
    int n_rows, n_sequences, channels;
};

// Returns the largest error of an output; infinity if an update is not the input.
double run(const Case & c, int seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const int before = N_TAPS - 1, n = c.n_rows, n_nodes = n * c.n_sequences;
    const int n_slots = c.n_sequences + 2, n_inputs = (before + n) * c.n_sequences;
    const int64_t u_row = c.channels + 8;
    Array<float> committed(static_cast<size_t>(n_slots) * before * c.channels);
    Array<float> u(n_nodes * u_row), kernel(static_cast<size_t>(c.channels) * N_TAPS);
    Array<float> updates(static_cast<size_t>(n_inputs + 1) * c.channels, -1.0f);
    Array<float> out(static_cast<size_t>(n_nodes) * c.channels,
                     std::numeric_limits<float>::quiet_NaN());
    Array<int32_t> inputs(n_inputs), taps(static_cast<size_t>(N_TAPS) * n_nodes);
    Array<int64_t> update_rows(n_inputs);
    for (Array<float> * x : {&committed, &u, &kernel}) {
        for (float & value : x->host) {
            value = normal(random);
        }
    }
    for (int s = 0; s < c.n_sequences; ++s) {
        const std::vector<int32_t> parents = parents_of(c.shape, n, random);
        const int first = s * (before + n), slot = (s + 1) % n_slots;
        for (int i = 0; i < before + n; ++i) {
            inputs.host[first + i] =
                i < before ? slot * before + i : n_slots * before + s * n + i - before;
            update_rows.host[first + i] = n_inputs - first - i;
        }
        for (int i = 0; i < n; ++i) {
            int row = before + i; // input of a tap, from the last tap to the first
            for (int tap = before; tap >= 0; --tap) {
                taps.host[tap * n_nodes + s * n + i] = first + row;
                row = row >= before ? before + parents[row - before] : row - 1;
            }
        }
    }
    DeltaConvolution work = {};
    work.committed = committed.to_gpu();
    work.u = u.to_gpu();
    work.u_row = u_row;
    work.kernel = kernel.to_gpu();
    work.inputs = inputs.to_gpu();
    work.taps = taps.to_gpu();
    work.updates = updates.to_gpu();
    work.update_rows = update_rows.to_gpu();
    work.out = out.to_gpu();
    work.n_committed = n_slots * before;
    work.n_rows = n;
    work.n_sequences = c.n_sequences;
    work.channels = c.channels;
    check(delta_convolve(work, cudaStreamPerThread), "delta_convolve");
    check(cudaStreamSynchronize(cudaStreamPerThread), "convolution");
    out.to_host();
    updates.to_host();

    const auto input = [&](int index, int channel) {
        const int row = inputs.host[index];
        return row < work.n_committed
                   ? committed.host[static_cast<size_t>(row) * c.channels + channel]
                   : u.host[(row - work.n_committed) * u_row + channel];
    };
    double error = 0;
    for (int channel = 0; channel < c.channels; ++channel) {
        for (int i = 0; i < n_inputs; ++i) {
            if (updates.host[update_rows.host[i] * c.channels + channel] != input(i, channel)) {
                return std::numeric_limits<double>::infinity();
            }
        }
        for (int x = 0; x < n_nodes; ++x) {
            double sum = 0;
            for (int tap = 0; tap < N_TAPS; ++tap) {
                sum += static_cast<double>(kernel.host[channel * N_TAPS + tap]) *
                       input(taps.host[tap * n_nodes + x], channel);
            }
            const double actual = out.host[static_cast<size_t>(x) * c.channels + channel];
            error = std::isfinite(actual)
                        ? std::max(error, std::fabs(actual - sum / (1 + std::exp(-sum))))
                        : std::numeric_limits<double>::infinity();
        }
    }
    return error;
}

} // namespace

int main() {
    const Case cases[] = {{CHAIN, 1, 1, 64},  {CHAIN, 17, 1, 200}, {TREE, 23, 3, 130},
                          {COMB, 16, 2, 128}, {STAR, 9, 1, 33},    {TREE, 64, 1, 128}};
    bool has_failed = false;
    for (const Case & c : cases) {
        const double error = run(c, c.n_rows);
        const bool is_wrong = !(error < MAX_ERROR);
        std::printf("n %3d sequences %d channels %3d %-5s: %.1e%s\n", c.n_rows, c.n_sequences,
                    c.channels, SHAPES[c.shape], error, is_wrong ? " WRONG" : "");
        has_failed |= is_wrong;
    }
    std::printf("convolution: %s\n", has_failed ? "FAILED" : "right");
    return has_failed ? 1 : 0;
}
