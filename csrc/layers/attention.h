// Softmax attention over cells. Everything that differs between layers comes from LayerShape.
#pragma once

#include "layers/build.h"

namespace dfl {

struct KeyValue {
    ggml_tensor * k; // [head_dim, n_head_kv, n_rows]
    ggml_tensor * v; // same
};

// Separate key and value projections of x [n_embd, n_rows].
KeyValue project_kv(Build & b, int il, ggml_tensor * x);

struct Projections {
    ggml_tensor * q; // [q_width, n_rows]; rows may be further apart than their width
    ggml_tensor * k; // [head_dim, n_head_kv, n_rows]
    ggml_tensor * v; // [head_dim, n_head_kv, n_rows]
};

// Separate or fused projections of x [n_embd, n_rows].
Projections project_qkv(Build & b, int il, ggml_tensor * x, int64_t q_width);

// x: [head_dim, n_heads, n_rows] -> same, rotated by positions: i32 [n_rows], or [4 * n_rows].
ggml_tensor * rope(Build & b, int il, ggml_tensor * x, ggml_tensor * positions);

// Writes k and v [head_dim, n_head_kv, n_rows] into cells: i64 [n_rows].
void store_kv(Build & b, int il, ggml_tensor * k, ggml_tensor * v, ggml_tensor * cells);

// Writes k and v into the batch's cells and attends over the cells the mask shows.
// q: [head_dim, n_head, n_rows] -> [head_dim * n_head, n_rows].
ggml_tensor * attend(Build & b, int il, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v);

// The whole sublayer of llama and qwen3: project, norm heads where there are norms, rope, attend,
// output projection. x: [n_embd, n_rows] -> same.
ggml_tensor * self_attention(Build & b, int il, ggml_tensor * x);

} // namespace dfl
