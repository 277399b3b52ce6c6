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
    APPEND, // advances the recurrent state: prefill and plain decoding
    VERIFY, // leaves the committed state alone and writes the trace that PROMOTE reads
    PROMOTE,
    DRAFT,
    INJECT,
};

// Sizes of one batch. Rows of one sequence are adjacent, and every sequence has the same number.
struct BatchShape {
    GraphKind kind = GraphKind::APPEND;
    int64_t n_rows = 0; // of all sequences together
    int64_t n_seqs = 1;
    int64_t first_seq = 0; // their recurrent slots are first_seq .. first_seq + n_seqs - 1
    int64_t n_kv = 0;      // cells attention reads
    int64_t n_out = 0;     // rows that get logits; 0: none
    bool walks = false;    // recurrent layers run in our own code
    bool by_paths = false; // recurrent layers take the form for trees
    int64_t n_inject = 0;  // feature rows projected into the drafter's cache
    int64_t n_top = 0;     // candidates of a draft picked on the device
    bool top_by_blocks = false;
    bool log_sum_exp = false;

    bool operator==(const BatchShape & o) const {
        return kind == o.kind && n_rows == o.n_rows && n_seqs == o.n_seqs &&
               first_seq == o.first_seq && n_kv == o.n_kv && n_out == o.n_out && walks == o.walks &&
               by_paths == o.by_paths && n_inject == o.n_inject && n_top == o.n_top &&
               top_by_blocks == o.top_by_blocks && log_sum_exp == o.log_sum_exp;
    }
};

// How n nodes of recurrent layers hang together, the same for every layer. A row i stands twice:
// for its query, which sees i itself, and for its key, which does not.
struct PathInputs {
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
    ggml_tensor * positions = nullptr; // i32 [n_rows], or [4 * n_rows] for M-RoPE
    ggml_tensor * cells = nullptr;     // i64 [n_rows]
    ggml_tensor * out_rows = nullptr;  // i32 [n_out] that get logits; NULL: all
    int64_t first_out = 0;             // from this one on, where out_rows is NULL
    std::vector<ggml_tensor *> masks;  // f16 [n_kv, n_rows], kept; as CellMasks has them
    std::vector<PathInputs> paths;     // of every n the recurrent layers need
    // i32 [d_conv * n_rows], tap by tap: rows of (committed ++ new) convolution inputs; trees only.
    ggml_tensor * conv_taps = nullptr;
    ggml_tensor * parents = nullptr; // i32 [n_rows]: -1, or an earlier row; trees of our own code
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
    std::vector<PathMasks> path_masks = {};
    std::vector<QuantizedRows> quantized_rows = {};
    std::vector<MadeRows> made_rows = {};
    std::vector<TurnedUnits> turned_units = {};
    // Called with the residual stream [n_embd, n_rows] that enters layer il; may be empty.
    std::function<void(int il, ggml_tensor * x)> tap = {};
};

} // namespace dfl
