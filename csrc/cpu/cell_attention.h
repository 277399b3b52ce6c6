// Attention of a few queries over the cells of a K/V cache in half precision. Every query's sums
// run over the cells as they lie, alone, so its result has the same bits whatever other queries or
// masked cells there are.
#pragma once

#include <cstdint>

namespace dfl::cpu {

// Queries that share one K/V head. Query i is head i % n_group of row i / n_group.
struct CellAttention {
    int64_t head_dim, n_group;
    const float * q; // [head_dim] at row * q_row + head * q_head
    int64_t q_row, q_head;
    const uint16_t * k; // halves [head_dim] at cell * k_cell
    const uint16_t * v; // the same
    int64_t k_cell, v_cell;
    const uint16_t * mask; // halves [n_cells] at row * mask_row: 0 or minus infinity
    int64_t mask_row, n_cells;
    float scale;
    float * out; // [head_dim] at row * out_row + head * head_dim
    int64_t out_row;
};

// Most queries of one call.
constexpr int64_t MAX_QUERIES = 16;

struct CellAttentionKernel {
    int lanes; // head_dim is a multiple of it
    // Floats of scratch.
    int64_t (*scratch_size)(int64_t head_dim, int64_t n_cells);
    // Queries [first, first + n), n at most MAX_QUERIES.
    void (*attend)(const CellAttention & work, int64_t first, int64_t n, float * scratch);
};

// The best one for this CPU, or NULL.
const CellAttentionKernel * cell_attention();
// Those of each instruction set; NULL where the compiler lacks it.
const CellAttentionKernel * cell_attention_avx512();
const CellAttentionKernel * cell_attention_avx2();

} // namespace dfl::cpu
