// Softmax attention over K/V cells. LayerShape holds all that differs between layers.
#pragma once

#include "layers/cpu_ops/head_rows.h"
#include "layers/decoder.h"

namespace dfl {

// Keys and values of a layer, [head_dim, n_head_kv, n_rows]; v equals k in layers without V
// weights.
struct KeyValue {
    ggml_tensor * k;
    ggml_tensor * v;
};

// Returns the key and value projections of every layer for the same x [n_embd, n_rows].
std::vector<KeyValue> project_kv(GraphContext & g, const Rows & x);

struct Projections {
    ggml_tensor * q; // query projection [q_width, n_rows]; rows may have gaps between them
    ggml_tensor *
        k; // key projection [head_dim, n_head_kv, n_rows]; NULL: another layer's K and V are read
    ggml_tensor * v; // value projection in the shape of k; equals k in layers without V weights
};

// Returns the projections of x [n_embd, n_rows] by layer il, with separate or fused weights.
Projections project_qkv(GraphContext & g, int il, const Rows & x, int64_t q_width);

// Returns the cells in which a pass stores the K/V rows of layer il, i64 [n_rows].
ggml_tensor * row_cells(const GraphContext & g, int il);

// Writes normed and rotated keys, and values (normed if the model norms them), into their cells.
void store_kv(GraphContext & g, int il, const HeadRows & rows);

// Stores keys and values unless rows.k is NULL. Returns attention, [head_dim * n_head, n_rows].
ggml_tensor * attend(GraphContext & g, int il, const HeadRows & rows);

// Returns (output weight x attended) * Hparams::value_scale + add. attended: result of attention.
ggml_tensor * project_output(GraphContext & g, int il, const Rows & attended, ggml_tensor * add);

// Builds the usual attention sublayer: projections, optional head norms, rope, attention, output.
ggml_tensor * self_attention(GraphContext & g, int il, const SubLayerInput & in);
// Builds attention with an output gate. The rows of q hold each head's query, then its gate.
ggml_tensor * gated_attention(GraphContext & g, int il, const SubLayerInput & in);

} // namespace dfl
