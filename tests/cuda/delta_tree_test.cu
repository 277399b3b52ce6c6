// Compares the kernels of Gated DeltaNet with the recurrence in float64, node by node.
//
// usage: delta_tree_test [quick]; "quick" runs the cases that a GPU in software computes in
// seconds.
#include "cuda/delta_promote.h"
#include "cuda/delta_tree.h"
#include "support.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace {

using namespace dfl::cuda;
using namespace kernel_test;

constexpr int D = 128;
constexpr double MAX_ERROR = 2e-5; // relative to the largest value of a result
constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

struct Case {
    int n, n_sequences, n_k, n_v;
    Shape shape;
    float decay;  // scale of the log decays; above 1 every third node decays by at most 1 %
    bool is_unit; // q and k have length 1
    bool has_counts;
    DeltaTreeLaunch launch;
    int n_layers = 1;
};

struct Errors {
    double out = 0, out_range = 0, state = 0, state_range = 0;
    bool is_wrong = false; // true: padding or a convolution's inputs are wrong
    void add_out(double actual, double expected) {
        out = std::isfinite(actual) ? std::max(out, std::fabs(actual - expected)) : 1e30;
        out_range = std::max(out_range, std::fabs(expected));
    }
    void add_state(double actual, double expected) {
        state = std::isfinite(actual) ? std::max(state, std::fabs(actual - expected)) : 1e30;
        state_range = std::max(state_range, std::fabs(expected));
    }
};

Errors run(const Case & c, int seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform;
    const int n = c.n, rows = n * c.n_sequences, n_slots = c.n_sequences + 1;
    const int64_t qkv_row = D * (2 * c.n_k + c.n_v) + 12, gate_row = 2 * c.n_v + 5;
    const int64_t update_row = (update_size(D, c.n_k, c.n_v) + 7) / 4 * 4;
    const int64_t slot_size = static_cast<int64_t>(D) * D * c.n_v, layer_size = slot_size * n_slots;
    const int n_update_rows = rows + 2, n_inputs = 3, channels = 64;

    Array<float> state(layer_size * c.n_layers);
    Array<float> qkv(rows * qkv_row, NOT_A_NUMBER), gates(rows * gate_row, NOT_A_NUMBER);
    Array<float> out(static_cast<size_t>(rows) * D * c.n_v, NOT_A_NUMBER);
    Array<float> updates(n_update_rows * update_row * c.n_layers, NOT_A_NUMBER);
    Array<int32_t> parents(rows), counts(c.n_sequences, n), slots(c.n_sequences);
    Array<int64_t> update_rows(rows);
    Array<int32_t> path(c.n_sequences * n, -1000000), lengths(c.n_sequences);
    Array<float> conv(static_cast<size_t>(c.n_layers) * n_slots * n_inputs * channels, -1.0f);
    Array<float> conv_updates(static_cast<size_t>(c.n_layers) * 40 * channels);
    Array<int32_t> conv_rows(c.n_sequences * n_inputs);

    for (float & x : state.host) {
        x = normal(random);
    }
    for (int i = 0; i < rows; ++i) {
        for (int h = 0; h < 2 * c.n_k + c.n_v; ++h) {
            float * x = &qkv.host[i * qkv_row + h * D];
            double sum = 0;
            for (int j = 0; j < D; ++j) {
                x[j] =
                    normal(random) + 0.3f; // a shared direction, so that no product of heads is 0
                sum += x[j] * x[j];
            }
            for (int j = 0; j < D && c.is_unit && h < 2 * c.n_k; ++j) {
                x[j] /= static_cast<float>(std::sqrt(sum));
            }
        }
        for (int h = 0; h < c.n_v; ++h) {
            const float scale = c.decay > 1 && i % 3 == 0 ? 0.01f : c.decay;
            gates.host[i * gate_row + h] = -scale * uniform(random);
            gates.host[i * gate_row + c.n_v + h] = uniform(random);
        }
        update_rows.host[i] = (i * 7 + 1) % rows + 1; // a permutation unless 7 divides rows
        if (rows % 7 == 0) {
            update_rows.host[i] = rows - i;
        }
    }
    for (int s = 0; s < c.n_sequences; ++s) {
        const auto tree = parents_of(c.shape, n, random);
        std::copy(tree.begin(), tree.end(), parents.host.begin() + s * n);
        slots.host[s] = (s + 1) % n_slots;
        if (c.has_counts) {
            counts.host[s] = std::max(1, n - s * 5);
        }
        for (int i = 0; i < n_inputs; ++i) {
            conv_rows.host[s * n_inputs + i] = static_cast<int32_t>(random() % 40);
        }
    }
    for (size_t i = 0; i < conv_updates.host.size(); ++i) {
        conv_updates.host[i] = static_cast<float>(i);
    }

    const float eps = c.is_unit ? -1.0f : 1e-6f, q_scale = 1 / std::sqrt(static_cast<float>(D));
    DeltaTree work = {};
    work.state = state.to_gpu();
    work.state_slot = slot_size;
    work.slots = slots.to_gpu();
    work.q = qkv.to_gpu();
    work.k = work.q + D * c.n_k;
    work.v = work.k + D * c.n_k;
    work.q_row = work.k_row = work.v_row = qkv_row;
    work.g = gates.to_gpu();
    work.beta = work.g + c.n_v;
    work.gate_row = gate_row;
    work.parents = c.shape == CHAIN ? nullptr : parents.to_gpu();
    work.counts = c.has_counts ? counts.to_gpu() : nullptr;
    work.out = out.to_gpu();
    work.updates = updates.to_gpu();
    work.update_row = update_row;
    work.update_rows = update_rows.to_gpu();
    work.eps = eps;
    work.q_scale = q_scale;
    work.n_rows = n;
    work.n_sequences = c.n_sequences;
    work.n_k = c.n_k;
    work.n_v = c.n_v;
    for (int layer = 0; layer < c.n_layers; ++layer) { // layers differ only in their states
        DeltaTree layer_work = work;
        layer_work.state += layer * layer_size;
        layer_work.updates += layer * n_update_rows * update_row;
        check(delta_tree(layer_work, c.launch, cudaStreamPerThread), "delta_tree");
    }
    check(cudaStreamSynchronize(cudaStreamPerThread), "tree form");
    out.to_host();

    // The last of several sequences accepts no node, so its state must not change.
    std::vector<int> last_nodes(c.n_sequences);
    for (int s = 0; s < c.n_sequences; ++s) {
        last_nodes[s] = s == 0 ? counts.host[s] - 1 : static_cast<int>(random() % counts.host[s]);
        std::vector<int32_t> nodes;
        for (int i = last_nodes[s]; i >= 0; i = parents.host[s * n + i]) {
            nodes.insert(nodes.begin(), static_cast<int32_t>(update_rows.host[s * n + i]));
        }
        if (c.n_sequences > 1 && s == c.n_sequences - 1) {
            last_nodes[s] = -1;
            nodes.clear();
        }
        std::copy(nodes.begin(), nodes.end(), path.host.begin() + s * n);
        lengths.host[s] = static_cast<int32_t>(nodes.size());
    }
    const std::vector<float> before = state.host;
    DeltaPromotion promotion = {};
    promotion.state = state.gpu;
    promotion.state_layer = layer_size;
    promotion.state_slot = slot_size;
    promotion.updates = updates.gpu;
    promotion.update_layer = n_update_rows * update_row;
    promotion.update_row = update_row;
    promotion.path = path.to_gpu();
    promotion.counts = lengths.to_gpu();
    promotion.slots = slots.gpu;
    promotion.conv = conv.to_gpu();
    promotion.conv_layer = static_cast<int64_t>(n_slots) * n_inputs * channels;
    promotion.conv_slot = n_inputs * channels;
    promotion.conv_updates = conv_updates.to_gpu();
    promotion.conv_update_layer = 40 * channels;
    promotion.conv_rows = conv_rows.to_gpu();
    promotion.n_inputs = n_inputs;
    promotion.channels = channels;
    promotion.max_path = n;
    promotion.n_layers = c.n_layers;
    promotion.n_sequences = c.n_sequences;
    promotion.n_k = c.n_k;
    promotion.n_v = c.n_v;
    check(delta_promote(promotion, cudaStreamPerThread), "delta_promote");
    check(cudaStreamSynchronize(cudaStreamPerThread), "promotion");
    state.to_host();
    conv.to_host();

    Errors errors;
    std::vector<std::vector<double>> states(n, std::vector<double>(D * D));
    for (int s = 0; s < c.n_sequences; ++s) {
        for (int layer = 0; layer < c.n_layers; ++layer) {
            const int64_t slot = layer * layer_size + slots.host[s] * slot_size;
            for (int i = 0; i < n_inputs * channels; ++i) {
                const float expected =
                    last_nodes[s] < 0
                        ? -1.0f
                        : conv_updates
                              .host[(layer * 40 + conv_rows.host[s * n_inputs + i / channels]) *
                                        channels +
                                    i % channels];
                errors.is_wrong |=
                    conv.host[((layer * n_slots + slots.host[s]) * n_inputs) * channels + i] !=
                    expected;
            }
            for (int h = 0; h < c.n_v; ++h) {
                const float * state0 = &before[slot + static_cast<int64_t>(h) * D * D];
                for (int i = 0; i < counts.host[s]; ++i) {
                    const int row = s * n + i, parent = parents.host[row];
                    const float * x = &qkv.host[row * qkv_row];
                    const float *q = x + h % c.n_k * D, *k = q + c.n_k * D;
                    const float * v = x + (2 * c.n_k + h) * D;
                    double q_sum = 0, k_sum = 0;
                    for (int j = 0; j < D; ++j) {
                        q_sum += static_cast<double>(q[j]) * q[j];
                        k_sum += static_cast<double>(k[j]) * k[j];
                    }
                    const double q_factor = (c.is_unit ? 1 : 1 / std::sqrt(q_sum + eps)) * q_scale;
                    const double k_factor = c.is_unit ? 1 : 1 / std::sqrt(k_sum + eps);
                    const double decay =
                        std::exp(static_cast<double>(gates.host[row * gate_row + h]));
                    const double beta = gates.host[row * gate_row + c.n_v + h];
                    for (int r = 0; r < D; ++r) {
                        double * to = &states[i][r * D];
                        double state_k = 0;
                        for (int j = 0; j < D; ++j) {
                            to[j] = decay *
                                    (parent < 0 ? state0[r * D + j] : states[parent][r * D + j]);
                            state_k += to[j] * k[j] * k_factor;
                        }
                        const double u = beta * (v[r] - state_k);
                        double output = 0;
                        for (int j = 0; j < D; ++j) {
                            to[j] += u * k[j] * k_factor;
                            output += to[j] * q[j] * q_factor;
                        }
                        if (layer == c.n_layers - 1) { // every layer writes to the same outputs
                            errors.add_out(
                                out.host[(static_cast<int64_t>(row) * c.n_v + h) * D + r], output);
                        }
                    }
                }
                for (int j = 0; j < D * D; ++j) {
                    errors.add_state(state.host[slot + static_cast<int64_t>(h) * D * D + j],
                                     last_nodes[s] < 0 ? state0[j] : states[last_nodes[s]][j]);
                }
            }
        }
        for (int i = counts.host[s]; i < n; ++i) {
            for (int j = 0; j < D * c.n_v; ++j) {
                errors.is_wrong |= out.host[(static_cast<int64_t>(s) * n + i) * D * c.n_v + j] != 0;
            }
        }
    }
    return errors;
}

} // namespace

int main(int n_arguments, char ** arguments) {
    const std::string mode = n_arguments > 1 ? arguments[1] : "all";
    std::vector<Case> cases;
    const DeltaTreeLaunch launches[] = {{1, 2}, {1, 1}, {2, 1}};
    int i_case = 0;
    for (const int n : {1, 2, 7, 16, 17, 23, 33, 64, 65, 130, 256}) {
        for (const Shape shape : {CHAIN, TREE, COMB, STAR}) {
            if (mode == "quick" && (n == 64 || n > 65 || (shape > TREE && n != 23))) {
                continue;
            }
            const int n_sequences = (i_case + n) % 2 == 0 ? 3 : 1;
            const float decay = i_case % 3 == 0 ? 0.1f : i_case % 3 == 1 ? 1.0f : 60.0f;
            cases.push_back({n, n_sequences, 2, 4, shape, decay, i_case % 4 == 1, i_case % 3 == 2,
                             launches[i_case % 3]});
            ++i_case;
        }
    }
    cases.push_back({23, 1, 2, 4, CHAIN, 1.0f, false, false, {1, 2}, 3}); // 3 layers
    cases.push_back({40, 1, 2, 2, TREE, 1.0f, false, false, {1, 4}});
    cases.push_back({40, 2, 2, 2, TREE, 1.0f, false, true, {2, 2}});
    cases.push_back({19, 1, 2, 2, TREE, 1.0f, false, false, {4, 1}});
    cases.push_back({35, 1, 1, 4, TREE, 1.0f, false, false, {1, 1}});
    cases.push_back({37, 1, 2, 6, TREE, 1.0f, false, false, {1, 4}});
    cases.push_back({37, 2, 2, 6, TREE, 1.0f, false, true, {2, 2}});
    cases.push_back({256, 1, 2, 6, CHAIN, 60.0f, false, false, {1, 2}});
    for (const int n : {1, 16, 22}) {
        cases.push_back({n, n == 16 ? 3 : 1, 16, 48, TREE, 1.0f, false, false, {1, 2}});
    }
    if (mode == "all") {
        cases.push_back({63, 1, 16, 48, TREE, 0.3f, false, false, {2, 2}});
        cases.push_back({130, 3, 16, 48, TREE, 0.3f, false, true, {1, 2}});
    }
    bool has_failed = false;
    double worst_out = 0, worst_state = 0;
    for (const Case & c : cases) {
        const Errors errors = run(c, 1 + c.n);
        const double out = errors.out / errors.out_range;
        const double state = errors.state / errors.state_range;
        const bool is_wrong = !(out < MAX_ERROR && state < MAX_ERROR) || errors.is_wrong;
        std::printf("n %3d sequences %d heads %2d/%2d %-5s decay %4.1f launch %d,%d: out %.1e, "
                    "state %.1e%s%s\n",
                    c.n, c.n_sequences, c.n_k, c.n_v, SHAPES[c.shape], c.decay, c.launch.slices,
                    c.launch.node_groups, out, state,
                    errors.is_wrong ? ", padding or convolution" : "", is_wrong ? " WRONG" : "");
        std::fflush(stdout);
        has_failed |= is_wrong;
        worst_out = std::max(worst_out, out);
        worst_state = std::max(worst_state, state);
    }
    std::printf("%zu cases, worst: out %.1e, state %.1e: %s\n", cases.size(), worst_out,
                worst_state, has_failed ? "FAILED" : "right");
    return has_failed ? 1 : 0;
}
