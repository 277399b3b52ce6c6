// Table of K/V cache cells: the sequence and position of the row in each cell. Rope is applied
// before rows are stored, so a row may be in any cell. A sequence fills its own pages before it
// claims another page, so its cells stay adjacent while other sequences grow. Sequences and
// prefixes that begin alike may share full pages. A shared page is never written to, and is free
// when its last holder drops it. A sequence's shared pages come first: page i has positions [i *
// PAGE, (i + 1) * PAGE).
#pragma once

#include "cpu/attention/cell_attention.h"

#include <cstdint>
#include <ggml.h>
#include <vector>

namespace dfl {

class CellTable {
  public:
    static constexpr int32_t FREE = -1;
    static constexpr int32_t SHARED = -2;
    // Number of cells of a page; the last page may have fewer.
    static constexpr int64_t PAGE = cpu::CELL_BLOCK;

    // packs: reuse released cells at once, and claim the lowest free page. For few cells and
    // sliding windows; a sequence then claims a page only when its other pages are full.
    explicit CellTable(int64_t n_cells, int32_t n_sequences = 1, bool packs = false);

    int64_t size() const { return n_cells() - n_reserved_; }
    // Returns the number of cells, including a reserved last cell.
    int64_t n_cells() const { return static_cast<int64_t>(sequence_.size()); }
    // Reserves the last cell for padding: it may be written to, and no row attends to it.
    void reserve_last();
    // Returns a bound: only cells below it, and the reserved cell, may have been written to.
    int64_t n_touched() const { return n_touched_; }
    int64_t n_unclaimed() const { return n_unclaimed_; }
    // Returns the highest used cell + 1.
    int64_t high() const { return high_; }
    // Returns the sequence that holds a cell, or FREE, or SHARED for cells of shared pages.
    int32_t sequence(int64_t cell) const { return sequence_[cell]; }
    // Returns the position of a cell's row, or FREE if no row may attend to the cell.
    int32_t position(int64_t cell) const { return position_[cell]; }

    // Returns the number of cells of the pages that a sequence must claim for n more rows.
    int64_t cells_needed(int32_t sequence, int64_t n) const;
    // Takes n cells for a sequence, from its own pages first. Throws DFL_STATUS_ARGUMENT if fewer
    // than n cells are free.
    std::vector<int64_t> take(int32_t sequence, int64_t n);
    void place(int64_t cell, int32_t position);
    void release(int64_t cell);
    // Rows of cells [from, from + n), to be copied to cells [to, to + n).
    struct Copy {
        int64_t from, to, n;
    };
    // Frees a sequence's cells with positions >= `position`. If `position` is inside a page with
    // other holders, claims a page and returns the rows to copy to the new page, else n = 0. Throws
    // DFL_STATUS_ARGUMENT and changes nothing if can_release_from() is false.
    Copy release_from(int32_t sequence, int32_t position);
    bool can_release_from(int32_t sequence, int32_t position) const;
    void release_before(int32_t sequence, int32_t position);

    // Returns the cells of a sequence that have positions, as spans in the order of positions.
    const std::vector<cpu::CellSpan> & spans(int32_t sequence) const;

    // Shares the first n pages of a sequence, whose rows must lie in order from position 0 on.
    void share(int32_t sequence, int64_t n);
    const std::vector<int64_t> & shared(int32_t sequence) const {
        return sequence_cells_[sequence].shared;
    }
    void attach_pages(int32_t sequence, const std::vector<int64_t> & pages);
    // Claims a free page as a shared page for the positions from `position` on. The caller becomes
    // its holder. Throws DFL_STATUS_ARGUMENT if no page is free.
    int64_t take_page(int32_t position);
    void hold(int64_t page) { ++holders_[page]; }
    void drop(int64_t page);
    // Returns the number of sequences and blocks that hold a shared page.
    int32_t n_holders(int64_t page) const { return holders_[page]; }

    // Fills a row's mask of cells [first, first + n): 0 if visible, else -inf. window: positions
    // attended to, the row's own included; 0: all. causal false: later positions too.
    void mask_row(int32_t sequence, int32_t position, int64_t window, bool causal, int64_t first,
                  int64_t n, ggml_fp16_t * row) const;

    // Returns the cells whose sequence or position changed since the last call, ascending.
    std::vector<int64_t> take_changes();

  private:
    struct SequenceCells {
        std::vector<int64_t> shared;
        std::vector<int64_t> pages; // pages claimed by the sequence, oldest first
        int64_t next = 0;           // first cell to search, as an index in the cells of `pages`
        mutable std::vector<cpu::CellSpan> spans;
        mutable bool spans_valid = true;
    };

    int64_t page_size(int64_t page) const;
    int64_t n_pages() const { return static_cast<int64_t>(used_.size()); }
    bool may_claim(int64_t page) const;
    int64_t claim_lowest();
    void claim_page(SequenceCells & owned);
    void free_page(int64_t page);
    void lower_high();
    void free_cell(int64_t cell, bool may_be_handed_out);
    static void add_to_spans(SequenceCells & owned, int64_t cell, int64_t position);
    static void drop_from_spans(SequenceCells & owned, int64_t cell, int64_t position);
    void record_change(int64_t cell);

    bool packs_;
    std::vector<int32_t> sequence_;
    std::vector<int32_t> position_;
    std::vector<int32_t> used_;    // number of cells of each page that are not free
    std::vector<int32_t> holders_; // number of holders of each page; 0: not shared
    std::vector<bool> is_claimed_;
    std::vector<SequenceCells> sequence_cells_;
    std::vector<int64_t> changes_; // cells changed since take_changes(), some repeatedly
    int64_t n_unclaimed_ = 0;
    int64_t high_ = 0;
    int64_t n_reserved_ = 0;
    int64_t n_touched_ = 0;
    int64_t first_unclaimed_ = 0; // all pages before this page are claimed
};

} // namespace dfl
