// Convolution of Gated DeltaNet along the paths of candidate trees, then silu.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

namespace dfl::cuda {

constexpr int N_TAPS = 4; // taps of the convolution that the kernel supports

// Arguments of the convolution of one layer. An input is one row of channels.
struct DeltaConvolution {
    const float * committed; // committed inputs of all slots, [channels, n_committed]
    const float * u;         // inputs of the pass, with stride u_row in floats
    int64_t u_row;
    const float * kernel; // [N_TAPS, channels]
    // Inputs of each sequence: N_TAPS - 1 committed ones, then those of its nodes, as indices into
    // the committed inputs followed by those of the pass, [N_TAPS - 1 + n_rows, n_sequences].
    const int32_t * inputs;
    const int32_t * taps;        // index into `inputs` of each tap, [n_rows * n_sequences, N_TAPS]
    float * updates;             // receives all inputs, [channels, rows]
    const int64_t * update_rows; // row of `updates` of each input
    float * out;                 // [channels, n_rows * n_sequences]
    int n_committed, n_rows, n_sequences, channels;
};

cudaError_t delta_convolve(const DeltaConvolution & work, cudaStream_t stream);

} // namespace dfl::cuda
