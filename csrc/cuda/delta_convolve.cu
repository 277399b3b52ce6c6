#include "cuda/delta_convolve.h"
#include "cuda/math.cuh"

namespace dfl::cuda {
namespace {

constexpr int N_THREADS = 128; // channels of a block
constexpr int N_NODES = 4;     // inputs and nodes of a block, which share the loaded weights

// A block stores its inputs as updates, and computes its nodes, for its channels.
__global__ void __launch_bounds__(N_THREADS) convolve(const DeltaConvolution work) {
    const int channel = blockIdx.x * N_THREADS + threadIdx.x;
    if (channel >= work.channels) {
        return;
    }
    const float4 weights = quad(work.kernel + static_cast<int64_t>(channel) * N_TAPS);
    const auto input = [&](int index) {
        const int row = work.inputs[index];
        return row < work.n_committed
                   ? work.committed[static_cast<int64_t>(row) * work.channels + channel]
                   : work.u[(row - work.n_committed) * work.u_row + channel];
    };
    const int n_nodes = work.n_rows * work.n_sequences;
    const int n_inputs = (N_TAPS - 1) * work.n_sequences + n_nodes;
    const int first = blockIdx.y * N_NODES;
#pragma unroll
    for (int x = first; x < first + N_NODES; ++x) {
        if (x < n_inputs) {
            work.updates[work.update_rows[x] * work.channels + channel] = input(x);
        }
        if (x < n_nodes) {
            const auto tap = [&](int i) { return input(work.taps[i * n_nodes + x]); };
            const float sum = dot(weights, make_float4(tap(0), tap(1), tap(2), tap(3)), 0);
            work.out[static_cast<int64_t>(x) * work.channels + channel] = sum / (1 + expf(-sum));
        }
    }
}

} // namespace

cudaError_t delta_convolve(const DeltaConvolution & work, cudaStream_t stream) {
    const int n_inputs = (N_TAPS - 1 + work.n_rows) * work.n_sequences;
    const dim3 grid((work.channels + N_THREADS - 1) / N_THREADS,
                    (n_inputs + N_NODES - 1) / N_NODES);
    convolve<<<grid, N_THREADS, 0, stream>>>(work);
    return cudaGetLastError();
}

} // namespace dfl::cuda
