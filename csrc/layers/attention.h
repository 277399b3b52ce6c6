// Softmax attention over cells. Everything that differs between layers comes from LayerShape.
#pragma once

#include "layers/cpu_ops/head_rows.h"
#include "layers/decoder.h"

namespace dfl {

struct KeyValue {
    ggml_tensor * k; // [head_dim, n_head_kv, n_rows]
    ggml_tensor * v; // same; k where the layer has no value projection
};

// Every layer's key and value projections of the same x [n_embd, n_rows].
std::vector<KeyValue> project_kv(GraphContext & g, const Rows & x);

struct Projections {
    ggml_tensor * q; // [q_width, n_rows]; rows may be further apart than their width
    ggml_tensor * k; // [head_dim, n_head_kv, n_rows], or NULL: of another layer
    ggml_tensor * v; // same; k where the layer has no value projection
};

// Separate or fused projections of x [n_embd, n_rows].
Projections project_qkv(GraphContext & g, int il, const Rows & x, int64_t q_width);

// Where a pass stores the rows of a layer, i64 [n_rows].
ggml_tensor * row_cells(const GraphContext & g, int il);

// Writes the keys, normed and rotated, and the values, normed where they are, into their cells.
void store_kv(GraphContext & g, int il, const HeadRows & rows);

// The same, and lets the queries, normed and rotated, attend over the cells that the rows see
// -> [head_dim * n_head, n_rows].
ggml_tensor * attend(GraphContext & g, int il, const HeadRows & rows);

// The output projection of what attend() returned, scaled where the model scales it, plus `add`.
ggml_tensor * project_output(GraphContext & g, int il, const Rows & attended, ggml_tensor * add);

// The usual sublayer: project, norm heads where there are norms, rope, attend, project.
ggml_tensor * self_attention(GraphContext & g, int il, const SubLayerInput & in);

} // namespace dfl
