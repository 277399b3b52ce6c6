// What a graph builder is given and returns. Shapes in csrc comments are in ggml order: [ne0, ne1,
// ...], the contiguous dimension first.
#pragma once

#include "cache.h"
#include "hparams.h"
#include "weights.h"

#include <vector>

namespace dfl {

// Sizes of one batch. Rows of one sequence are adjacent, and every sequence has the same number.
struct BatchShape {
    int64_t n_rows = 0; // of all sequences together
    int64_t n_seqs = 1;
    int64_t first_seq = 0; // their recurrent slots are first_seq .. first_seq + n_seqs - 1
    int64_t n_kv = 0;      // cells attention reads
    int64_t n_out = 0;     // rows that get logits; 0: none

    bool operator==(const BatchShape & o) const {
        return n_rows == o.n_rows && n_seqs == o.n_seqs && first_seq == o.first_seq &&
               n_kv == o.n_kv && n_out == o.n_out;
    }
};

struct Mask {
    int64_t window;
    ggml_tensor * tensor; // f16 [n_kv, n_rows]
};

struct GraphInputs {
    ggml_tensor * embd = nullptr;      // f32 [n_embd, n_rows]
    ggml_tensor * positions = nullptr; // i32 [n_rows], or [4 * n_rows] for M-RoPE
    ggml_tensor * cells = nullptr;     // i64 [n_rows]
    ggml_tensor * out_rows = nullptr;  // i32 [n_out]; NULL when every row gets logits
    std::vector<Mask> masks;           // one for each window in the model
};

// A builder only adds nodes to ctx and graph: it computes nothing and moves no cursor.
struct Build {
    ggml_context * ctx;
    ggml_cgraph * graph;
    const Hparams & hp;
    const Weights & weights;
    const KvCache & kv;
    const RecurrentCache & recurrent;
    BatchShape shape;
    GraphInputs in;
};

} // namespace dfl
