// Attention of query rows over the cells of a K/V cache, batch-invariant.
//
// Blocks of CELL_BLOCK absolute positions are added in order, with a running maximum. Segments of
// CELL_SEGMENT positions are computed separately and merged in order, so that threads may share the
// segments of a row, and a row has the same bits in a prefill, in a verify and alone. Cells that a
// row does not see change nothing, whatever they hold.
#pragma once

#include "dflash.h"

#include <cstddef>
#include <cstdint>
#include <ggml.h>
#include <vector>

namespace dfl::cpu {

constexpr int64_t CELL_BLOCK = DFL_PAGE, CELL_SEGMENT = 2048;

// A run of n adjacent cells that hold consecutive positions.
struct CellSpan {
    int64_t position, cell, n;
};

// Cell of a tree node in a pending verify, visible only to the node and its descendants.
struct PendingCell {
    int64_t position, cell;
};

// Positions that a row sees in a layer without a window: positions of the spans before `end`, then
// pending cells of the row's path, one for each position from `end` to `position`.
struct RowView {
    int64_t position, end;
    int64_t path; // index in VisibleCells::paths where the row's tree path starts
};

// Cells that one sequence's rows see in a pass; spans and pending cells ascend by position.
struct VisibleCells {
    std::vector<CellSpan> spans;
    std::vector<PendingCell> pending;
    std::vector<RowView> rows;
    std::vector<int32_t> paths; // each row's tree path, as indices into `pending`
};

// Rows of one K/V head in a cache: head_dim values of `type`, in whole blocks, cell_bytes apart.
struct CellRows {
    const char * first;
    size_t cell_bytes;
    ggml_type type;
};

// Attention of queries that share one K/V head. Query i is head i % n_group of row i / n_group.
struct CellAttention {
    int64_t head_dim, n_group;
    const float * q; // query of row r and head h: [head_dim] at r * q_row + h * q_head
    int64_t q_row, q_head;
    CellRows k, v;
    const VisibleCells * visible;
    int64_t window; // positions that a row may see, its own included; 0: all
    bool causal;    // if false, rows also see later positions of the spans, up to the window
    float scale;
    const float * sinks; // [n_group] scores of attention sinks, which have no values; or NULL
    float * out;         // result of row r and head h: [head_dim] at r * out_row + h * head_dim
    int64_t out_row;
    // The thread's next attention, whose first cells are prefetched during this one; or NULL.
    const CellAttention * next = nullptr;
    bool is_fetched = false; // true if the previous attention prefetched the first cells
};

constexpr int64_t MAX_QUERIES = 96;

struct SegmentRange {
    int64_t first, end;
};

struct CellAttentionKernel {
    // Returns floats of scratch for attend(), segment(). n_pending: most pending cells of a
    // sequence.
    int64_t (*scratch_size)(int64_t head_dim, int64_t n_pending);
    // Returns the number of floats of a query's partial result of one segment.
    int64_t (*part_size)(int64_t head_dim);
    // Computes attention of queries [first, first + n) over all visible cells; n <= MAX_QUERIES.
    void (*attend)(const CellAttention & work, int64_t first, int64_t n, float * scratch);
    // segment() writes the partial results of n queries for one segment, [n][part_size]. merge()
    // joins the partial results of one query, part_stride floats apart, in segment order.
    void (*segment)(const CellAttention & work, int64_t first, int64_t n, int64_t segment,
                    float * parts, float * scratch);
    void (*merge)(const CellAttention & work, int64_t query, const float * parts, int64_t n_parts,
                  int64_t part_stride, float * scratch);
};

// Returns the segments that hold cells visible to queries [first, first + n).
SegmentRange visible_segments(const CellAttention & work, int64_t first, int64_t n);

// Returns the best attention kernel for this CPU.
const CellAttentionKernel * cell_attention();

} // namespace dfl::cpu
