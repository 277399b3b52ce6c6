// Times the kernels of Gated DeltaNet on a GPU, in captured graphs of 48 launches with a state
// each. An error of CUDA ends a measurement, not the run. With -DDFL_PHASES: also cycles by part of
// the tree form.
#include "cuda/delta_promote.h"
#include "cuda/delta_tree.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

using namespace dfl::cuda;

namespace {

constexpr int D = 128, N_K = 16, N_V = 48, LAYERS = 48, MAX_N = 256, MAX_SEQUENCES = 4;
constexpr int CHANNELS = D * (2 * N_K + N_V), INPUTS = 3;
constexpr int64_t STATE = static_cast<int64_t>(D) * D * N_V;
constexpr int64_t UPDATE = update_size(D, N_K, N_V);

bool is_ok(cudaError_t status, const char * what) {
    if (status != cudaSuccess) {
        std::printf("%s: %s\n", what, cudaGetErrorString(status));
    }
    return status == cudaSuccess;
}

__global__ void fill(float * x, size_t n, float low, float high, unsigned seed) {
    for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n;
         i += static_cast<size_t>(gridDim.x) * blockDim.x) {
        unsigned bits = static_cast<unsigned>(i) * 2654435761u + seed;
        bits = (bits ^ bits >> 15) * 2246822519u;
        bits = (bits ^ bits >> 13) * 3266489917u;
        x[i] = low + (high - low) * static_cast<float>((bits ^ bits >> 16) >> 8) / 16777216.0f;
    }
}

__global__ void copy(const float4 * from, float4 * to, size_t n) {
    for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n;
         i += static_cast<size_t>(gridDim.x) * blockDim.x) {
        to[i] = from[i];
    }
}

// Reads one layer's state as the tree form does, without computing. A block reads 32 KB.
__global__ void __launch_bounds__(128) read_state(const float4 * from, float * to) {
    float4 x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        x[i] = __ldg(from + (blockIdx.x * 16 + i) * 128 + threadIdx.x);
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        sum += x[i].x + x[i].y + x[i].z + x[i].w;
    }
    if (sum == 12345.678f) {
        *to = sum;
    }
}

__global__ void nothing() {}

float * floats(size_t n, float low, float high) {
    float * x = nullptr;
    if (!is_ok(cudaMalloc(&x, n * sizeof(float)), "cudaMalloc")) {
        std::exit(1);
    }
    fill<<<1024, 256>>>(x, n, low, high, static_cast<unsigned>(n));
    return x;
}

int32_t * integers(const std::vector<int32_t> & values) {
    int32_t * x = nullptr;
    if (!is_ok(cudaMalloc(&x, values.size() * sizeof(int32_t)), "cudaMalloc")) {
        std::exit(1);
    }
    cudaMemcpy(x, values.data(), values.size() * sizeof(int32_t), cudaMemcpyHostToDevice);
    return x;
}

// Measured runs of a graph, replays in each, and runs before them that are not measured.
constexpr int RUNS = 10, REPLAYS = 4, WARM_UP_RUNS = 3;

// Returns the median time of a graph's replay, in microseconds, or 0 after an error.
double median_us(cudaStream_t stream, const std::function<cudaError_t()> & work) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t program = nullptr;
    if (!is_ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture")) {
        return 0;
    }
    const cudaError_t status = work();
    const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
    if (!is_ok(status, "launch") || !is_ok(ended, "capture") ||
        !is_ok(cudaGraphInstantiate(&program, graph, 0), "graph")) {
        cudaGetLastError();
        return 0;
    }
    cudaEvent_t began, ended_at;
    cudaEventCreate(&began);
    cudaEventCreate(&ended_at);
    std::vector<float> times;
    for (int i = 0; i < RUNS + WARM_UP_RUNS; ++i) {
        cudaEventRecord(began, stream);
        for (int replay = 0; replay < REPLAYS; ++replay) {
            cudaGraphLaunch(program, stream);
        }
        cudaEventRecord(ended_at, stream);
        if (!is_ok(cudaStreamSynchronize(stream), "run")) {
            return 0;
        }
        float ms = 0;
        cudaEventElapsedTime(&ms, began, ended_at);
        if (i >= WARM_UP_RUNS) {
            times.push_back(ms * 1000 / REPLAYS);
        }
    }
    cudaEventDestroy(began);
    cudaEventDestroy(ended_at);
    cudaGraphExecDestroy(program);
    cudaGraphDestroy(graph);
    std::sort(times.begin(), times.end());
    return times[RUNS / 2];
}

std::vector<int32_t> parents_of(bool is_tree, int n, int n_sequences) {
    std::mt19937 random(n);
    std::vector<int32_t> parents;
    for (int s = 0; s < n_sequences; ++s) {
        for (int i = 0; i < n; ++i) { // a tree of about 3 nodes at each depth
            const int back =
                is_tree ? 1 + static_cast<int>(random() % std::min(std::max(1, i), 6)) : 1;
            parents.push_back(i == 0 ? -1 : std::max(0, i - back));
        }
    }
    return parents;
}

} // namespace

int main() {
    cudaDeviceProp device;
    if (!is_ok(cudaGetDeviceProperties(&device, 0), "device")) {
        return 1;
    }
    const int n_sms = device.multiProcessorCount;
    std::printf("%s, sm_%d%d, %d SMs, L2 %.0f MB, shared memory %zu KB an SM\n", device.name,
                device.major, device.minor, n_sms, device.l2CacheSize / 1048576.0,
                device.sharedMemPerMultiprocessor / 1024);
    cudaStream_t stream;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);

    float * states = floats(STATE * LAYERS * MAX_SEQUENCES, -1, 1);
    float * target = floats(STATE * LAYERS, 0, 0);
    float * qkv = floats(static_cast<size_t>(MAX_N) * CHANNELS, -1, 1);
    float * decays = floats(static_cast<size_t>(MAX_N) * N_V, -1, 0);
    float * betas = floats(static_cast<size_t>(MAX_N) * N_V, 0, 1);
    float * out = floats(static_cast<size_t>(MAX_N) * D * N_V, 0, 0);
    float * updates = floats(UPDATE * MAX_N * LAYERS, 0, 0);
    float * conv = floats(static_cast<size_t>(CHANNELS) * INPUTS * LAYERS, 0, 0);
    float * conv_updates = floats(static_cast<size_t>(CHANNELS) * 40 * LAYERS, 0, 1);
    is_ok(cudaDeviceSynchronize(), "fill");

    const double state_mb = STATE * LAYERS * 4 / 1e6;
    constexpr int IN_GRAPH = 4;
    const auto copies = [&] {
        for (int i = 0; i < IN_GRAPH; ++i) {
            copy<<<n_sms * 8, 512, 0, stream>>>(reinterpret_cast<float4 *>(states),
                                                reinterpret_cast<float4 *>(target),
                                                STATE * LAYERS / 4);
        }
        return cudaGetLastError();
    };
    for (int i = 0; i < 20; ++i) { // until the clocks are at their highest
        median_us(stream, copies);
    }
    const double copy_time = median_us(stream, copies) / IN_GRAPH,
                 copy_gb_per_s = 2 * state_mb * 1e3 / copy_time;
    const double memcpy_time =
        median_us(stream,
                  [&] {
                      for (int i = 1; i < IN_GRAPH; ++i) {
                          cudaMemcpyAsync(target, states, STATE * LAYERS * 4,
                                          cudaMemcpyDeviceToDevice, stream);
                      }
                      return cudaMemcpyAsync(target, states, STATE * LAYERS * 4,
                                             cudaMemcpyDeviceToDevice, stream);
                  }) /
        IN_GRAPH;
    const double empty = median_us(stream, [&] {
        for (int layer = 0; layer < LAYERS; ++layer) {
            nothing<<<1, 32, 0, stream>>>();
        }
        return cudaGetLastError();
    });
    const double read = median_us(stream, [&] {
        for (int layer = 0; layer < LAYERS; ++layer) {
            read_state<<<STATE / 4 / 128 / 16, 128, 0, stream>>>(
                reinterpret_cast<float4 *>(states + layer * STATE), target);
        }
        return cudaGetLastError();
    });
    std::printf("copy of %.0f MB: kernel %.0f GB/s, memcpy %.0f GB/s (read and written)\n",
                state_mb, copy_gb_per_s, 2 * state_mb * 1e3 / memcpy_time);
    std::printf("48 empty kernels: %.2f us each; 48 kernels that read a layer's state: %.2f us "
                "each, %.0f GB/s\n",
                empty / LAYERS, read / LAYERS, state_mb * 1e3 / read);

    DeltaTree work = {};
    work.state_slot = STATE * LAYERS;
    work.q = qkv;
    work.k = qkv + D * N_K;
    work.v = qkv + 2 * D * N_K;
    work.q_row = work.k_row = work.v_row = CHANNELS;
    work.g = decays;
    work.beta = betas;
    work.gate_row = N_V;
    work.out = out;
    work.update_row = UPDATE;
    work.eps = 1e-6f;
    work.q_scale = 0.088388f;
    work.n_k = N_K;
    work.n_v = N_V;
    const auto layer_time = [&](int n, int n_sequences, bool is_tree, DeltaTreeLaunch launch) {
        work.n_rows = n;
        work.n_sequences = n_sequences;
        int32_t * parents = integers(parents_of(is_tree, n, n_sequences));
        work.parents = is_tree ? parents : nullptr;
        const double time = median_us(stream, [&] {
            for (int layer = 0; layer < LAYERS; ++layer) {
                work.state = states + layer * STATE;
                work.updates = updates + layer * UPDATE * MAX_N;
                const cudaError_t status = delta_tree(work, launch, stream);
                if (status != cudaSuccess) {
                    return status;
                }
            }
            return cudaSuccess;
        });
        cudaFree(parents);
        return time / LAYERS;
    };
    const auto report = [&](int n, int n_sequences, bool is_tree) {
        work.n_rows = n;
        work.n_sequences = n_sequences;
        const DeltaTreeLaunch launch = choose_launch(work, n_sms, device.sharedMemPerBlockOptin);
        const double us = layer_time(n, n_sequences, is_tree, launch);
        if (us == 0) {
            return;
        }
        const double gb = n_sequences * STATE * 4 / 1e3 / us;
        const double flops = n_sequences * 4.0 * n * STATE / us / 1e6;
        std::printf("%-5s n %3d sequences %d launch %d,%d: %7.2f us a layer, %5.0f GB/s of state, "
                    "%3.0f %% of the copy, state products alone %4.1f Tflop/s\n",
                    is_tree ? "tree" : "chain", n, n_sequences, launch.slices, launch.node_groups,
                    us, gb, gb / copy_gb_per_s * 100, flops);
#ifdef DFL_PHASES
        long long cycles[8];
        read_phases(cycles);
        const double runs = (RUNS + WARM_UP_RUNS) * REPLAYS * LAYERS;
        std::printf("    cycles of block 0: wait %.0f, walk and norm %.0f, products %.0f, earlier "
                    "tiles %.0f, finish %.0f, solve %.0f, outputs %.0f\n",
                    cycles[0] / runs, cycles[1] / runs, cycles[2] / runs, cycles[3] / runs,
                    cycles[4] / runs, cycles[5] / runs, cycles[6] / runs);
#endif
        std::fflush(stdout);
    };
    for (const bool is_tree : {false, true}) {
        for (const int n : {1, 2, 4, 8, 16, 22, 31, 63, 127, 255}) {
            report(n, 1, is_tree);
        }
    }
    report(16, 4, true);
    report(22, 4, true);
#ifndef DFL_PHASES
    for (const int n : {1, 4, 8, 16, 22, 31, 63, 127}) {
        std::printf("tree n %d, us a layer by launch:", n);
        for (const int slices : {1, 2, 4}) {
            for (const int groups : {1, 2, 4}) {
                if (N_V / N_K * slices * groups <= MAX_WARPS) {
                    std::printf(" %d,%d %.2f;", slices, groups,
                                layer_time(n, 1, true, {slices, groups}));
                }
            }
        }
        std::printf("\n");
        std::fflush(stdout);
    }
    layer_time(
        63, 1, false,
        choose_launch(
            work, n_sms,
            device.sharedMemPerBlockOptin)); // writes finite updates of 63 nodes for the promotions
    for (const int n : {1, 2, 4, 8, 16, 32}) {
        std::vector<int32_t> path;
        for (int i = 0; i < n; ++i) {
            path.push_back(i);
        }
        DeltaPromotion promotion = {};
        promotion.state = states;
        promotion.state_layer = STATE;
        promotion.state_slot = STATE * LAYERS;
        promotion.updates = updates;
        promotion.update_layer = UPDATE * MAX_N;
        promotion.update_row = UPDATE;
        int32_t *nodes = integers(path), *count = integers({n}), *rows = integers({1, 2, 3});
        promotion.path = nodes;
        promotion.counts = count;
        promotion.conv = conv;
        promotion.conv_layer = promotion.conv_slot = static_cast<int64_t>(CHANNELS) * INPUTS;
        promotion.conv_updates = conv_updates;
        promotion.conv_update_layer = static_cast<int64_t>(CHANNELS) * 40;
        promotion.conv_rows = rows;
        promotion.n_inputs = INPUTS;
        promotion.channels = CHANNELS;
        promotion.max_path = n;
        promotion.n_layers = LAYERS;
        promotion.n_sequences = 1;
        promotion.n_k = N_K;
        promotion.n_v = N_V;
        const double us = median_us(stream,
                                    [&] {
                                        for (int i = 1; i < IN_GRAPH; ++i) {
                                            delta_promote(promotion, stream);
                                        }
                                        return delta_promote(promotion, stream);
                                    }) /
                          IN_GRAPH;
        const double gb = us == 0 ? 0 : 2 * state_mb * 1e3 / us;
        std::printf("promotion of %2d nodes, 48 layers: %.1f us (%.2f a layer), %.0f GB/s of state "
                    "(read and written), %.0f %% of the copy\n",
                    n, us, us / LAYERS, gb, gb / copy_gb_per_s * 100);
        std::fflush(stdout);
        cudaFree(nodes);
        cudaFree(count);
        cudaFree(rows);
    }
#endif
    std::printf("end: %s\n", cudaGetErrorString(cudaGetLastError()));
    return 0;
}
