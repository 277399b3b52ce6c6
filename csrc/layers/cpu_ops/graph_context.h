// The context that layers build a graph in, and the inputs of graphs. Shapes in csrc comments are
// in ggml order: [ne0, ne1, ...], the contiguous dimension first.
#pragma once

#include "cache/kv_cache.h"
#include "cache/recurrent_cache.h"
#include "layers/cpu_ops/cpu_node.h"
#include "layers/cpu_ops/rows.h"
#include "model/hparams.h"
#include "model/weights.h"

#include <functional>
#include <vector>

namespace dfl {

enum class GraphKind {
    APPEND, // appends rows: prefill and plain decoding
    VERIFY, // also verifies rows, which write node updates and no committed state
    PROMOTE,
    DRAFT,
    INJECT,
};

// Shape of a padded batch of recurrent rows that ggml computes: a lane for each sequence, all of
// one length. A sequence without rows may have a lane, which leaves its state unchanged.
struct RecurrentBatchShape {
    int64_t n_rows = 0; // number of rows of each lane, padding included
    int64_t n_lanes = 0;
    bool is_verify = false; // true: rows write node updates; false: lanes advance committed states
    bool tree_form = false; // true: lanes run in tree form, as trees need
    bool in_place = false;  // true: lane i updates slot i in place; false: states are gathered
    bool identity_layout = false; // true: the lanes hold the rows of the pass in order

    int64_t size() const { return n_rows * n_lanes; }
    bool operator==(const RecurrentBatchShape & o) const {
        return n_rows == o.n_rows && n_lanes == o.n_lanes && is_verify == o.is_verify &&
               tree_form == o.tree_form && in_place == o.in_place &&
               identity_layout == o.identity_layout;
    }
};

// Shape of one pass; graphs are cached by it. Rows of one sequence are adjacent.
struct BatchShape {
    GraphKind kind = GraphKind::APPEND;
    int64_t n_rows = 0;
    std::vector<int64_t> n_kv = {}; // number of cells that attention reads in each K/V group
    int64_t n_out = 0;
    bool scans = false; // `scans`: recurrent layers run in our own CPU code.
    // `recurrent`: shapes of a pass's recurrent batches if ggml computes them, or of a promotion.
    std::vector<RecurrentBatchShape> recurrent = {};
    bool taps = false; // true: features of some rows are stored for drafters
    size_t drafter = 0;
    int64_t n_top = 0; // number of candidates that the device selects for each row; 0: none
    bool top_by_blocks = false;

    bool operator==(const BatchShape & o) const {
        return kind == o.kind && n_rows == o.n_rows && n_kv == o.n_kv && n_out == o.n_out &&
               scans == o.scans && recurrent == o.recurrent && taps == o.taps &&
               drafter == o.drafter && n_top == o.n_top && top_by_blocks == o.top_by_blocks;
    }
};

// Inputs of one recurrent batch of a graph, or NULL if not needed.
struct RecurrentInputs {
    // Cache slots of the lanes, i32 and i64 [n_lanes], unless lanes are in place.
    ggml_tensor *slots = nullptr, *to_slots = nullptr;
    // Indices of the lanes' convolution inputs, i32 [(d_conv - 1 + n_rows) * n_lanes], into the
    // committed inputs of all slots followed by the inputs of the pass.
    ggml_tensor * inputs = nullptr;
    // Indices of the convolution inputs to commit, i32 [(d_conv - 1) * n_lanes], into the committed
    // inputs of all slots followed by the inputs of the pass.
    ggml_tensor * last_inputs = nullptr;
    // Row of the pass of each lane row, i32 [n_rows * n_lanes]; padding: one past the last row.
    ggml_tensor * rows = nullptr;
    // Rows of node_updates and conv_updates that a verify writes, i64 [n_rows * n_lanes] and
    // [(d_conv - 1 + n_rows) * n_lanes].
    ggml_tensor *update_rows = nullptr, *conv_update_rows = nullptr;
    // Indices of the convolution inputs that each tap reads, i32 [d_conv * n_rows * n_lanes].
    ggml_tensor * conv_taps = nullptr;
    // Inputs of our CUDA kernels: index of each node's parent, or -1, i32 [n_rows * n_lanes], and
    // number of nodes of each lane, i32 [n_lanes].
    ggml_tensor *parents = nullptr, *counts = nullptr;
};

// Inputs of a promotion. For a single sequence one operation advances all layers, each as a lane.
struct PromoteInputs {
    // Rows of node_updates of accepted nodes, i32 [n_steps * n_lanes]; padding: the row of zeros.
    ggml_tensor * path = nullptr;
    // Rows of conv_updates to commit as convolution inputs, i32 [(d_conv - 1) * n_lanes].
    ggml_tensor * conv_rows = nullptr;
    ggml_tensor * to_slots = nullptr; // slots, i64 [n_lanes]; NULL: single sequence, all layers
    ggml_tensor * counts = nullptr;   // for our own kernels: length of each path, i32 [n_lanes]
};

// Ancestor masks of n nodes of a lane, equal for all layers. Each node i has two rows: the row of
// its query sees node i itself, the row of its key does not.
struct TreeInputs {
    int64_t batch = -1; // recurrent batch of the trees; -1: mask of a chain, for all batches
    int64_t n = 0;
    // Matrix f32 [n, 2n, 1, lanes of a verify, else 1]: 1 where node j is i or an ancestor, else 0.
    ggml_tensor * ancestors = nullptr;
    // mask as a term of exponents: 0 if the row sees the node, else -inf
    ggml_tensor * bias = nullptr;
    ggml_tensor * identity = nullptr;
};

// Ancestor masks repeated for each value head and lane, [n, 2n, n_v_heads, n_lanes].
struct TreeMasks {
    TreeInputs in;
    int64_t n_lanes;
    ggml_tensor * ancestors;
    ggml_tensor * bias;
    std::vector<ggml_tensor *> identities;
};

struct GraphInputs {
    ggml_tensor * embd = nullptr;      // token embeddings f32 [n_embd, n_rows]
    ggml_tensor * per_layer = nullptr; // per-layer embeddings [n_per_layer * n_layer, n_rows]
    ggml_tensor * positions = nullptr; // token positions i32 [n_rows], or [4 * n_rows] for M-RoPE
    ggml_tensor * out_rows = nullptr;  // `out_rows`: rows with logits, i32 [n_out]; NULL: all.
    // `cells`, `masks`: for each K/V group, the cells that rows are stored in, i64 [n_rows], and
    // cell masks, f16 [n_kv, n_rows], which stay on the device between passes.
    std::vector<ggml_tensor *> cells;
    std::vector<std::vector<ggml_tensor *>> masks;
    std::vector<RecurrentInputs> recurrent;
    ggml_tensor * lane_rows = nullptr; // index of each pass row among all lane rows, i32 [n_rows]
    std::vector<TreeInputs> trees;
    ggml_tensor * unit = nullptr; // scales of query and key heads, f32 [1, 2 * n_k_heads]
};

// Rows quantised by a node for packed products. Products of the same rows share the tensor.
struct QuantizedRows {
    Rows rows;
    void (*quantize_row)(const float * x, int64_t n_in, void * dst);
    ggml_tensor * tensor;
};

// Rows that were normed or gated into a tensor for ggml. Operations on the same rows share it.
struct MadeRows {
    Rows rows;
    ggml_tensor * tensor;
};

// Cosines and sines of rope at some positions, shared by layers with the same rope.
struct RotatedUnits {
    RopeShape rope;
    const ggml_tensor * positions;
    ggml_tensor * units;
};

// Context of functions that build graphs: they add nodes to ctx and graph and change no cache.
struct GraphContext {
    ggml_context * ctx;
    ggml_cgraph * graph;
    CpuNodes & cpu_nodes;
    const Hparams & hp;
    const Weights & weights;
    const KvCache & kv;
    const RecurrentCache & recurrent;
    BatchShape shape;
    GraphInputs in;
    int64_t batch_index = 0; // index in shape.recurrent of the batch that is being built
    std::vector<TreeMasks> tree_masks = {};
    std::vector<QuantizedRows> quantized_rows = {};
    std::vector<MadeRows> made_rows = {};
    std::vector<RotatedUnits> rotated_units = {};
    // Callback for the residual stream [n_embd, n_rows] that enters layer il; may be empty.
    std::function<void(int il, ggml_tensor * x)> tap = {};
    // True: `tap` also gets the last layer's output (as n_layer) and its norm (as n_layer + 1).
    bool taps_output = false;
};

} // namespace dfl
