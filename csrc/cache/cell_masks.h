// Attention masks that stay on the device between passes. A pass rewrites only changed cells, so
// its cost does not grow with the length of the sequence.
#pragma once

#include "cache/cell_table.h"
#include "cache/tree.h"
#include "device/backend.h"
#include "model/hparams.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace dfl {

// Window and causality of an attention layer. Layers of a device with equal rules share one mask.
struct MaskRule {
    int64_t window = 0;
    bool causal = true;

    bool operator==(const MaskRule & o) const { return window == o.window && causal == o.causal; }
};

// Rows [first, first + n) of a pass, all of one sequence; they attend to its cells by position.
struct SequenceRows {
    int32_t sequence;
    int64_t first, n;
    // Tree whose nodes the rows are, or NULL. Nodes attend to themselves and their ancestors.
    const Tree * tree;
};

struct MaskRows {
    const std::vector<int32_t> & positions;
    const std::vector<int64_t> & cells; // cells: the cell to which each row writes its K and V.
    // sequences: the pass's sequences, whose rows are adjacent. Padding rows follow: copies of the
    // last sequence's first row.
    const std::vector<SequenceRows> & sequences;
};

class CellMasks {
  public:
    CellMasks(const Hparams & hp, const std::vector<int64_t> & layers, const LayerPlace & place,
              int64_t n_cells, int64_t n_rows);
    // Grows the masks, which invalidates cached graphs. On DFL_STATUS_MEMORY nothing has changed.
    void reserve(int64_t n_rows);

    // Returns f16 [n_kv, n_rows] views of all masks over the first n_kv cells.
    std::vector<ggml_tensor *> views(ggml_context * ctx, int64_t n_kv, int64_t n_rows) const;
    // Returns the index of layer il's mask in views().
    int64_t index(int64_t il) const { return index_[il]; }

    bool empty() const { return masks_.empty(); }
    // Updates the masks for the rows of the next pass. Takes the table's list of changed cells.
    void update(CellTable & table, const MaskRows & rows, int64_t n_kv);

    uint64_t bytes(const Backend * on = nullptr) const;
    // Returns the bytes of mask values that all updates so far have written.
    uint64_t bytes_written() const { return bytes_written_; }

  private:
    struct MaskBuffer {
        MaskRule rule;
        Backend * backend;
        ggml_context_ptr ctx;
        Allocation memory;
        ggml_tensor * tensor = nullptr; // mask values, f16; rows of n_kv_ values without gaps
    };
    struct Span {
        int64_t first, end;
    };
    // Last write of a mask row: its sequence and position, and the number of earlier cell changes.
    struct WrittenRow {
        int32_t sequence, position;
        int64_t changes;
    };

    void log_changes(const CellTable & table, const std::vector<int64_t> & cells);
    int64_t n_unchanged_rows(const MaskRows & rows) const;
    std::vector<Span> changed_spans(const MaskBuffer & mask, const MaskRows & rows,
                                    int64_t n_unchanged) const;
    void fill(const MaskRule & rule, const CellTable & table, const MaskRows & rows, int64_t i,
              Span span, ggml_fp16_t * to) const;
    ggml_fp16_t * stage(int64_t n);
    void write(const MaskBuffer & mask, const CellTable & table, const MaskRows & rows, Span span,
               int64_t first_row, int64_t end_row);

    int64_t n_cells_, n_rows_;
    std::vector<MaskBuffer> masks_;
    std::vector<int64_t> index_; // index of each layer's mask, or -1
    int64_t n_kv_ = 0;           // n_kv_: number of cells in a mask row.
    // written_: last write of each mask row. Passes write from row 0 on, so later rows are older.
    std::vector<WrittenRow> written_;
    // Log of changed cells, oldest first. log_start_: number of older changes dropped from the log.
    std::vector<int64_t> log_;
    int64_t log_start_ = 0;
    // Cell of each sequence and position, or -1. Entries may be outdated.
    std::vector<std::vector<int32_t>> cell_at_;
    // Mask values of the last update, kept because some devices copy them only when a graph starts.
    // Later updates reuse the memory: the system takes longer to clear new pages than a prefill
    // takes to fill them.
    struct Staged {
        std::unique_ptr<ggml_fp16_t[]> values;
        int64_t size;
    };
    std::vector<Staged> staged_;
    size_t n_staged_ = 0; // number of entries of staged_ in use
    uint64_t bytes_written_ = 0;
};

} // namespace dfl
