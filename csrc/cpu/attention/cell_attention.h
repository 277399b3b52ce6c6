// Attention of rows over the cells of a K/V cache.
//
// A row's sums depend on its own cells and their positions alone. Blocks of CELL_BLOCK absolute
// positions are taken one after the other with a running maximum; those of a segment of
// CELL_SEGMENT positions begin anew, and segments are merged in their order. So threads may share
// the segments of a few rows, and a row has the same bits in a prefill, in a verify and alone. A
// cell that a row does not see changes nothing, whatever it holds.
#pragma once

#include "dflash.h"

#include <cstddef>
#include <cstdint>
#include <ggml.h>
#include <vector>

namespace dfl::cpu {

constexpr int64_t CELL_BLOCK = DFL_PAGE, CELL_SEGMENT = 2048;

// Cells side by side that hold positions one after another.
struct CellSpan {
    int64_t position, cell, n;
};

// The cell of a node of a tree, beside the spans.
struct PendingCell {
    int64_t position, cell;
};

// What a row sees in a layer without a window: positions of the spans before `end`, then the open
// cells of its path, one for each position from `end` to its own.
struct RowView {
    int64_t position, end;
    int64_t path; // where these begin in VisibleCells::paths
};

// What the rows of a sequence see in a pass.
struct VisibleCells {
    std::vector<CellSpan> spans;      // ascending
    std::vector<PendingCell> pending; // ascending
    std::vector<RowView> rows;
    std::vector<int32_t> paths; // indices of open cells
};

// The rows of one K/V head in a cache: head_dim values of `type`, whole blocks, cell_bytes apart.
struct CellRows {
    const char * first;
    size_t cell_bytes;
    ggml_type type;
};

// Queries that share one K/V head. Query i is head i % n_group of row i / n_group.
struct CellAttention {
    int64_t head_dim, n_group;
    const float * q; // [head_dim] at row * q_row + head * q_head
    int64_t q_row, q_head;
    CellRows k, v;
    const VisibleCells * visible;
    int64_t window; // positions a row may see, its own included; 0: all
    bool causal;    // false: also those of the spans after its own, as far as the window reaches
    float scale;
    const float * sinks; // [n_group] scores of nothing, or NULL
    float * out;         // [head_dim] at row * out_row + head * head_dim
    int64_t out_row;
    // What is attended to after this, whose first cells are asked for meanwhile; or NULL.
    const CellAttention * next = nullptr;
    bool is_fetched = false; // as somebody's next
};

// Most queries of one call.
constexpr int64_t MAX_QUERIES = 96;

struct SegmentRange {
    int64_t first, end;
};

struct CellAttentionKernel {
    // Floats of scratch, n_pending being the most open cells.
    int64_t (*scratch_size)(int64_t head_dim, int64_t n_pending);
    // Floats of what a segment leaves of a query.
    int64_t (*part_size)(int64_t head_dim);
    // Queries [first, first + n), n at most MAX_QUERIES, over all that they see.
    void (*attend)(const CellAttention & work, int64_t first, int64_t n, float * scratch);
    // The same in two steps: a segment's part of each query, [n][part_size], and all parts of one
    // query, part_stride apart, in the order of their segments.
    void (*segment)(const CellAttention & work, int64_t first, int64_t n, int64_t segment,
                    float * parts, float * scratch);
    void (*merge)(const CellAttention & work, int64_t query, const float * parts, int64_t n_parts,
                  int64_t part_stride, float * scratch);
};

// Segments that queries [first, first + n) see cells of.
SegmentRange visible_segments(const CellAttention & work, int64_t first, int64_t n);

// The best one for this CPU.
const CellAttentionKernel * cell_attention();

} // namespace dfl::cpu
