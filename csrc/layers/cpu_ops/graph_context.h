// The context that layers build a graph in, and the inputs of graphs. Shapes in csrc comments are
// in ggml order: [ne0, ne1,
// ...], the contiguous dimension first.
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

// What a graph does with the rows it runs.
enum class GraphKind {
    APPEND, // prefill and plain decoding
    VERIFY, // some rows are nodes of verifies, which leave committed states alone and write the
            // updates that PROMOTE reads
    PROMOTE,
    DRAFT,
    INJECT,
};

// The shape of a padded batch of recurrent rows where ggml computes them: a lane for each sequence,
// all of one length, so that an operation serves all. Whose they are, and which of a lane's
// rows are nobody's, is told by inputs: a sequence that nobody runs may have a lane, which leaves
// its state as it is.
struct RecurrentBatchShape {
    int64_t n_rows = 0; // of a lane
    int64_t n_lanes = 0;
    bool is_verify = false;       // else they advance the states
    bool tree_form = false;       // with ancestor masks, as trees need
    bool in_place = false;        // lane i is of slot i; else states are gathered, and brought back
    bool identity_layout = false; // in place, and the rows are the pass's, in its order

    int64_t size() const { return n_rows * n_lanes; }
    bool operator==(const RecurrentBatchShape & o) const {
        return n_rows == o.n_rows && n_lanes == o.n_lanes && is_verify == o.is_verify &&
               tree_form == o.tree_form && in_place == o.in_place &&
               identity_layout == o.identity_layout;
    }
};

// Sizes of one batch. Rows of one sequence are adjacent.
struct BatchShape {
    GraphKind kind = GraphKind::APPEND;
    int64_t n_rows = 0;             // of all sequences together
    std::vector<int64_t> n_kv = {}; // cells attention reads of each group of layers
    int64_t n_out = 0;              // rows that get logits; 0: none
    bool scans = false;             // recurrent layers run in our own code
    std::vector<RecurrentBatchShape> recurrent =
        {};             // all rows, where ggml runs them; or a promotion's
    bool taps = false;  // features for drafters are kept of some rows
    size_t drafter = 0; // number of the drafter, of a draft or an injection
    int64_t n_top = 0;  // candidates of a draft picked on the device
    bool top_by_blocks = false;

    bool operator==(const BatchShape & o) const {
        return kind == o.kind && n_rows == o.n_rows && n_kv == o.n_kv && n_out == o.n_out &&
               scans == o.scans && recurrent == o.recurrent && taps == o.taps &&
               drafter == o.drafter && n_top == o.n_top && top_by_blocks == o.top_by_blocks;
    }
};

// Inputs of one of BatchShape::recurrent. `before` is d_conv - 1. NULL where it is not needed.
struct RecurrentInputs {
    // i32 and i64 [n_lanes]: whose states they are. Of lanes that are not in place.
    ggml_tensor *slots = nullptr, *to_slots = nullptr;
    // i32 [(before + n_rows) * n_lanes]: a lane's convolution inputs among those committed by all
    // slots, then those of the pass.
    ggml_tensor * inputs = nullptr;
    // i32 [before * n_lanes]: likewise those that are committed then.
    ggml_tensor * last_inputs = nullptr;
    ggml_tensor * rows = nullptr; // i32 [n_rows * n_lanes] of the pass; one past them: nobody's
    // i64 [n_rows * n_lanes], and [(before + n_rows) * n_lanes]: update rows of a verify.
    ggml_tensor *update_rows = nullptr, *conv_update_rows = nullptr;
    // i32 [d_conv * n_rows * n_lanes], tap by tap: rows of the lanes' convolution inputs.
    ggml_tensor * conv_taps = nullptr;
};

// Inputs of a promotion, of all layers alike.
struct PromoteInputs {
    // i32 [n_steps * n_lanes]: update rows, padded with the one of zeros, which changes nothing; of
    // one slot for every layer, [n_steps, n_layers].
    ggml_tensor * path = nullptr;
    // i32 [d_conv - 1, n_lanes, or layers likewise]: rows of the convolution updates.
    ggml_tensor * conv_rows = nullptr;
    ggml_tensor * to_slots = nullptr; // i64 [n_lanes]: whose they become; one slot has none
};

// Ancestors among n nodes of a lane, the same for every layer. A row i stands twice: for its
// query, which sees i itself, and for its key, which does not.
struct TreeInputs {
    int64_t batch = -1; // which of BatchShape::recurrent, of a verify; else any that are appended
    int64_t n = 0;
    // f32 [n, 2n, 1, lanes of a verify, else 1]: 1 where j is i or an ancestor, else 0.
    ggml_tensor * ancestors = nullptr;
    ggml_tensor * bias = nullptr;     // the same: 0 where row i sees j, else -inf
    ggml_tensor * identity = nullptr; // f32 [n, n]
};

// The same for each value head and lane, [.., .., n_v_heads, n_lanes].
struct TreeMasks {
    TreeInputs in;
    int64_t n_lanes;
    ggml_tensor * ancestors;
    ggml_tensor * bias;
    std::vector<ggml_tensor *> identities; // one of each size that is solved for
};

struct GraphInputs {
    ggml_tensor * embd = nullptr;      // f32 [n_embd, n_rows]
    ggml_tensor * per_layer = nullptr; // f32 [n_per_layer * n_layer, n_rows], or NULL
    ggml_tensor * positions = nullptr; // i32 [n_rows], or [4 * n_rows] for M-RoPE
    ggml_tensor * out_rows = nullptr;  // i32 [n_out] that get logits; NULL: all
    // Of each group of layers: where rows are stored, i64 [n_rows]; and f16 [n_kv, n_rows], kept,
    // as CellMasks has them.
    std::vector<ggml_tensor *> cells;
    std::vector<std::vector<ggml_tensor *>> masks;
    std::vector<RecurrentInputs> recurrent; // of each of BatchShape::recurrent
    ggml_tensor * lane_rows = nullptr;      // i32 [n_rows]: where rows lie among those of all lanes
    std::vector<TreeInputs> trees;          // of every n the recurrent layers need
    ggml_tensor * unit = nullptr; // f32 [1, 2 * n_k_heads]: scales of normed queries and keys
};

// Rows as packed products take them; products of the same rows share them.
struct QuantizedRows {
    Rows rows;
    void (*quantize_row)(const float * x, int64_t n_in, void * dst);
    ggml_tensor * tensor;
};

// Rows for operations of ggml, which share them likewise.
struct MadeRows {
    Rows rows;
    ggml_tensor * tensor;
};

// Pairs (1, 0) rotated by rope at some positions; see head_rows.h.
struct RotatedUnits {
    RopeShape rope;
    const ggml_tensor * positions;
    ggml_tensor * units;
};

// A builder only adds nodes to ctx and graph: it computes nothing and moves no cursor.
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
    int64_t batch_index = 0; // which of shape.recurrent is built
    std::vector<TreeMasks> tree_masks = {};
    std::vector<QuantizedRows> quantized_rows = {};
    std::vector<MadeRows> made_rows = {};
    std::vector<RotatedUnits> rotated_units = {};
    // Called with the residual stream [n_embd, n_rows] that enters layer il; may be empty.
    std::function<void(int il, ggml_tensor * x)> tap = {};
    // Call `tap` with all rows that leave the last layer, too, as n_layer, and with these after the
    // final norm, as n_layer + 1.
    bool taps_output = false;
};

} // namespace dfl
