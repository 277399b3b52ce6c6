// Promotion of Gated DeltaNet: advances states along accepted paths, S <- exp(G_e) S + sum_j
// exp(G_e - G_j) u_j k_j^T, with G, u and k of delta_tree.h and e the last node of the path.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

namespace dfl::cuda {

// Arguments of the promotion: the states and convolution inputs of all layers of a device.
struct DeltaPromotion {
    float * state;
    int64_t state_layer, state_slot;
    const float * updates;
    int64_t update_layer, update_row;
    const int32_t * path;   // update rows of accepted nodes, from the root, [max_path, n_sequences]
    const int32_t * counts; // number of accepted nodes; 0: the sequence is unchanged
    const int32_t * slots;  // NULL: sequence s has slot s
    float * conv;           // committed inputs, [channels, n_inputs] in each slot
    int64_t conv_layer, conv_slot;
    const float * conv_updates; // rows of inputs, [channels, rows] in each layer
    int64_t conv_update_layer;
    const int32_t * conv_rows; // rows of conv_updates to commit, [n_inputs, n_sequences]
    int n_inputs, channels;
    int max_path, n_layers, n_sequences, n_k, n_v;
};

// Advances the states of all layers and sequences in one launch. Needs d = 128.
cudaError_t delta_promote(const DeltaPromotion & work, cudaStream_t stream);

} // namespace dfl::cuda
