// Attention masks that stay on the device from pass to pass: what a round writes of them depends on
// its rows, not on the length of the sequence.
#pragma once

#include "cache/cell_table.h"
#include "cache/tree.h"
#include "device/backend.h"
#include "model/hparams.h"

#include <cstdint>
#include <vector>

namespace dfl {

// Which earlier and later cells a row sees; every such rule of a model has one mask a device.
struct MaskRule {
    int64_t window = 0;
    bool causal = true;

    bool operator==(const MaskRule & o) const { return window == o.window && causal == o.causal; }
};

// Rows [first, first + n) of a pass, of one sequence: they see its cells by their positions.
struct SequenceRows {
    int32_t sequence;
    int64_t first, n;
    // Tree that the rows are nodes of, or NULL. A node sees itself and its ancestors.
    const Tree * tree;
};

struct MaskRows {
    const std::vector<int32_t> & positions;
    const std::vector<int64_t> & cells; // that they write
    // Without gaps. Rows after the last of them are copies of its first.
    const std::vector<SequenceRows> & sequences;
};

class CellMasks {
  public:
    // For these attention layers of a model where they lie, and passes of at most n_rows.
    CellMasks(const Hparams & hp, const std::vector<int64_t> & layers, const LayerPlace & place,
              int64_t n_cells, int64_t n_rows);
    // Makes room for passes of more rows, after which every graph that was built is void. Throws
    // DFL_STATUS_MEMORY and changes nothing.
    void reserve(int64_t n_rows);

    // All of them over the first n_kv cells: f16 [n_kv, n_rows] each.
    std::vector<ggml_tensor *> views(ggml_context * ctx, int64_t n_kv, int64_t n_rows) const;
    // Which of these is a layer's.
    int64_t index(int64_t il) const { return index_[il]; }

    bool empty() const { return masks_.empty(); }
    // Makes them those of these rows; takes the table's changes.
    void update(CellTable & table, const MaskRows & rows, int64_t n_kv);

    uint64_t bytes(const Backend * on = nullptr) const;
    // Of all updates so far.
    uint64_t bytes_written() const { return bytes_written_; }

  private:
    struct MaskBuffer {
        MaskRule rule;
        Backend * backend;
        ggml_context_ptr ctx;
        Allocation memory;
        ggml_tensor * tensor = nullptr; // [n_cells * n_rows]: rows of n_kv_ lie without gaps
    };
    // Cells [first, end).
    struct Span {
        int64_t first, end;
    };
    // What a row of the masks was written for.
    struct WrittenRow {
        int32_t sequence, position;
        int64_t changes; // of the log
    };

    void log_changes(const CellTable & table, const std::vector<int64_t> & cells);
    int64_t n_unchanged_rows(const MaskRows & rows) const;
    std::vector<Span> changed_spans(const MaskBuffer & mask, const MaskRows & rows,
                                    int64_t n_unchanged) const;
    void fill(const MaskRule & rule, const CellTable & table, const MaskRows & rows, int64_t i,
              Span span, ggml_fp16_t * to) const;
    void write(const MaskBuffer & mask, const CellTable & table, const MaskRows & rows, Span span,
               int64_t first_row, int64_t end_row);

    int64_t n_cells_, n_rows_;
    std::vector<MaskBuffer> masks_;
    std::vector<int64_t> index_; // -1 for other layers
    int64_t n_kv_ = 0;           // cells of a row as they were written
    // Rows were written for passes that all began with row 0, so later rows know no more changes
    // than earlier ones.
    std::vector<WrittenRow> written_;
    // Changed cells in the order of their changes, those before log_start_ forgotten.
    std::vector<int64_t> log_;
    int64_t log_start_ = 0;
    std::vector<std::vector<int32_t>> cell_at_; // of a sequence's positions; -1; may be outdated
    // What goes to devices until the next update: some copy it only as their graph begins.
    std::vector<std::vector<ggml_fp16_t>> staged_;
    uint64_t bytes_written_ = 0;
};

} // namespace dfl
