#include "cuda/delta_convolve.h"

namespace dfl::cuda {
namespace {

constexpr int N_THREADS = 128; // channels of a block

// A block stores one input as update, and computes one node, of the block's channels.
__global__ void __launch_bounds__(N_THREADS) convolve(const DeltaConvolution work) {
    const int channel = blockIdx.x * N_THREADS + threadIdx.x;
    if (channel >= work.channels) {
        return;
    }
    const auto input = [&](int index) {
        const int row = work.inputs[index];
        return row < work.n_committed
                   ? work.committed[static_cast<int64_t>(row) * work.channels + channel]
                   : work.u[(row - work.n_committed) * work.u_row + channel];
    };
    const int n_nodes = work.n_rows * work.n_sequences;
    const int x = blockIdx.y;
    work.updates[work.update_rows[x] * work.channels + channel] = input(x);
    if (x >= n_nodes) {
        return;
    }
    float sum = 0;
    for (int tap = 0; tap < work.n_taps; ++tap) {
        sum = fmaf(work.kernel[static_cast<int64_t>(channel) * work.n_taps + tap],
                   input(work.taps[tap * n_nodes + x]), sum);
    }
    work.out[static_cast<int64_t>(x) * work.channels + channel] = sum / (1.0f + expf(-sum));
}

} // namespace

cudaError_t delta_convolve(const DeltaConvolution & work, cudaStream_t stream) {
    const int n_inputs = (work.n_taps - 1 + work.n_rows) * work.n_sequences;
    const dim3 grid((work.channels + N_THREADS - 1) / N_THREADS, n_inputs);
    convolve<<<grid, N_THREADS, 0, stream>>>(work);
    return cudaGetLastError();
}

} // namespace dfl::cuda
