// Tree form of Gated DeltaNet: the outputs of a tree's nodes from the state before the tree.
//
// G is the sum of the log decays g from the root to a node; j runs over the ancestors of node i:
//   u_i = beta_i (v_i - exp(G_i) S k_i - sum_{j < i} exp(G_i - G_j) (k_j k_i) u_j)
//   o_i = exp(G_i) S q_i + sum_{j <= i} exp(G_i - G_j) (k_j q_i) u_j
// A promotion along the path to node e needs only u, k and g of its nodes:
//   S <- exp(G_e) S + sum_j exp(G_e - G_j) u_j k_j^T
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime.h>

namespace dfl::cuda {

constexpr int MAX_TREE_NODES = 256;
constexpr int MAX_WARPS = 12; // warps of a block of the tree form

// Arguments of the tree form for one layer. States are [d (keys), d (values), n_v] as in ggml;
// value head h uses key head h % n_k. Strides are in floats. Inputs of a node: q and k [d, n_k], v
// [d, n_v], g and beta [n_v]; row i of sequence s is row s * n_rows + i.
struct DeltaTree {
    const float * state;   // state of slot 0
    int64_t state_slot;    // distance of two slots
    const int32_t * slots; // slot of each sequence; NULL: sequence s has slot s
    const float *q, *k, *v;
    int64_t q_row, k_row, v_row;
    const float *g, *beta; // log decay and beta
    int64_t gate_row;
    const int32_t * parents; // index of each node's parent in its tree, or -1; NULL: chains
    const int32_t * counts;  // number of nodes of each sequence; NULL: n_rows
    float * out;             // [d, n_v, n_rows, n_sequences]; 0 in rows behind a sequence's nodes
    // Node updates for the promotion: unit k [d, n_k], u [d, n_v], g [n_v], with stride update_row.
    float * updates;
    int64_t update_row;
    const int64_t * update_rows; // update row of each row; NULL: the row's own index
    float eps;     // scales q and k by 1 / sqrt(sum of squares + eps); negative: leaves them
    float q_scale; // further factor of the queries
    int n_rows, n_sequences, n_k, n_v;
};

// Returns the number of floats of a node update.
constexpr int64_t update_size(int d, int n_k, int n_v) {
    return static_cast<int64_t>(d) * (n_k + n_v) + n_v;
}

// Shape of a launch. slices: number of slices of 16 values that a block computes, 1, 2, 4 or 8.
// node_groups: number of groups of warps that share a block's nodes, 1, 2 or 4.
struct DeltaTreeLaunch {
    int slices, node_groups;
};

// Returns the launch with the shortest estimated time on n_sms multiprocessors, whose blocks have
// at most max_shared bytes of shared memory; {0, 0} if there is none.
DeltaTreeLaunch choose_launch(const DeltaTree & work, int n_sms, size_t max_shared);
// Computes the outputs and node updates of one layer in one launch. Needs d = 128.
cudaError_t delta_tree(const DeltaTree & work, const DeltaTreeLaunch & launch, cudaStream_t stream);

#ifdef DFL_PHASES
// Returns the cycles that block 0 of the tree form has spent in each part, and resets them.
void read_phases(long long (&cycles)[8]);
#endif

} // namespace dfl::cuda
