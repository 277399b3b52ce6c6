// What a graph builder is given and returns. Shapes in csrc comments are in ggml order: [ne0, ne1,
// ...], the contiguous dimension first.
#pragma once

#include "cache/cache.h"
#include "layers/host/cpu_node.h"
#include "layers/host/rows.h"
#include "model/hparams.h"
#include "model/weights.h"

#include <functional>
#include <vector>

namespace dfl {

// What a graph does with the rows it runs.
enum class GraphKind {
    APPEND, // prefill and plain decoding
    VERIFY, // some rows are nodes of verifies, which leave committed states alone and write the
            // trace that PROMOTE reads
    PROMOTE,
    DRAFT,
    INJECT,
};

// Rows of one sequence in a batch, as recurrent layers take them where ggml computes them: its
// operations know a sequence by the address of its state.
struct RecurrentRows {
    int32_t sequence = 0;
    int64_t first = 0, n = 0;
    bool verifies = false;                   // else they advance the state
    bool by_paths = false;                   // in the form for trees
    int64_t first_trace = 0, first_conv = 0; // of a verify, as TraceRows has them

    bool operator==(const RecurrentRows & o) const {
        return sequence == o.sequence && first == o.first && n == o.n && verifies == o.verifies &&
               by_paths == o.by_paths && first_trace == o.first_trace && first_conv == o.first_conv;
    }
};

// Sizes of one batch. Rows of one sequence are adjacent.
struct BatchShape {
    GraphKind kind = GraphKind::APPEND;
    int64_t n_rows = 0;                        // of all sequences together
    std::vector<int64_t> n_kv = {};            // cells attention reads of each group of layers
    int64_t n_out = 0;                         // rows that get logits; 0: none
    bool walks = false;                        // recurrent layers run in our own code
    std::vector<RecurrentRows> recurrent = {}; // all rows, where ggml runs them; or a promotion's
    bool taps = false;                         // the drafter's features are kept of some rows
    int64_t n_inject = 0;                      // feature rows projected into the drafter's cache
    int64_t n_top = 0;                         // candidates of a draft picked on the device
    bool top_by_blocks = false;
    bool log_sum_exp = false;

    bool operator==(const BatchShape & o) const {
        return kind == o.kind && n_rows == o.n_rows && n_kv == o.n_kv && n_out == o.n_out &&
               walks == o.walks && recurrent == o.recurrent && taps == o.taps &&
               n_inject == o.n_inject && n_top == o.n_top && top_by_blocks == o.top_by_blocks &&
               log_sum_exp == o.log_sum_exp;
    }
};

// How n nodes of recurrent layers hang together, the same for every layer. A row i stands twice:
// for its query, which sees i itself, and for its key, which does not.
struct PathInputs {
    int64_t of = -1; // which of BatchShape::recurrent, of a verify; else any that are appended
    int64_t n = 0;
    ggml_tensor * ancestors = nullptr; // f32 [n, 2n]: 1 where j is i or an ancestor, else 0
    ggml_tensor * bias = nullptr;      // f32 [n, 2n]: 0 where row i sees j, else -inf
    ggml_tensor * identity = nullptr;  // f32 [n, n]
    ggml_tensor * unit = nullptr;      // f32 [d_state, 2n]: scales of normed queries and keys
};

// The same for each value head, [.., .., n_v_heads].
struct PathMasks {
    PathInputs in;
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
    std::vector<PathInputs> paths; // of every n the recurrent layers need
    // Of each of BatchShape::recurrent, NULL unless it verifies a tree: i32 [d_conv * n], tap by
    // tap: rows of (committed ++ new) convolution inputs.
    std::vector<ggml_tensor *> conv_taps;
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

// Pairs (1, 0) turned by rope at some positions; see head_rows.h.
struct TurnedUnits {
    RopeShape rope;
    const ggml_tensor * positions;
    ggml_tensor * units;
};

// A builder only adds nodes to ctx and graph: it computes nothing and moves no cursor.
struct Build {
    ggml_context * ctx;
    ggml_cgraph * graph;
    CpuNodes & cpu_nodes;
    const Hparams & hp;
    const Weights & weights;
    const KvCache & kv;
    const RecurrentCache & recurrent;
    BatchShape shape;
    GraphInputs in;
    int64_t of = 0; // which of shape.recurrent is built
    std::vector<PathMasks> path_masks = {};
    std::vector<QuantizedRows> quantized_rows = {};
    std::vector<MadeRows> made_rows = {};
    std::vector<TurnedUnits> turned_units = {};
    // Called with the residual stream [n_embd, n_rows] that enters layer il; may be empty.
    std::function<void(int il, ggml_tensor * x)> tap = {};
};

} // namespace dfl
