// Which row lies in which cell of a K/V cache. A K or V row is position-free once rope is applied,
// so it may lie in any cell.
//
// Cells are handed out by pages: a sequence fills its own before it takes another, so that its
// cells lie side by side although others grow beside it. Any sequence may take any share of the
// pages.
//
// A full page may be shared: by sequences that begin alike, and by whoever keeps what they began
// with. It is never written to again and free once nobody holds it. A sequence's shared pages come
// first; page i of it has positions [i * PAGE, (i + 1) * PAGE).
#pragma once

#include "cpu/attention/cell_attention.h"

#include <cstdint>
#include <ggml.h>
#include <vector>

namespace dfl {

// Host table: cell -> (sequence, position).
class CellTable {
  public:
    static constexpr int32_t FREE = -1;
    // In place of a sequence, of the cells of shared pages.
    static constexpr int32_t SHARED = -2;
    // Cells of a page; the last may have fewer.
    static constexpr int64_t PAGE = cpu::CELL_BLOCK;

    // packs: where cells are few and sequences move on all the time. Whatever is released is handed
    // out again at once, so that a sequence takes a page only when its others are full; and pages
    // are the lowest free ones.
    explicit CellTable(int64_t n_cells, int32_t n_sequences = 1, bool packs = false);

    int64_t size() const { return n_cells() - n_reserved_; }
    // With the cell that is out of use.
    int64_t n_cells() const { return static_cast<int64_t>(sequence_.size()); }
    // Takes the last cell out of use: padding may write there, and nobody sees it.
    void reserve_last();
    // The first so many cells may have been written to, and so may the one that is out of use.
    int64_t n_touched() const { return n_touched_; }
    // Number of cells in pages that nobody has.
    int64_t n_unclaimed() const { return n_unclaimed_; }
    // One past the highest used cell.
    int64_t high() const { return high_; }
    // FREE where nobody holds the cell, SHARED where several may.
    int32_t sequence(int64_t cell) const { return sequence_[cell]; }
    // FREE also where a row has no position yet: nobody sees it.
    int32_t position(int64_t cell) const { return position_[cell]; }

    // Cells of unclaimed pages that n more rows of a sequence take: whole pages, the last one
    // shorter.
    int64_t cells_needed(int32_t sequence, int64_t n) const;
    // Takes n cells for rows of a sequence, the lowest free ones of its own pages first. Throws
    // DFL_STATUS_ARGUMENT if there are fewer.
    std::vector<int64_t> take(int32_t sequence, int64_t n);
    // Gives the row of a taken cell its position, or another one.
    void place(int64_t cell, int32_t position);
    void release(int64_t cell);
    // Rows [from, from + n) that are to be copied to [to, to + n).
    struct Copy {
        int64_t from, to, n;
    };
    // Frees the placed cells of a sequence from a position on. Inside a shared page it takes a page
    // of its own for what is before the position: the rows to copy, none otherwise. Throws
    // DFL_STATUS_ARGUMENT, and has changed nothing, where can_release_from() is false.
    Copy release_from(int32_t sequence, int32_t position);
    bool can_release_from(int32_t sequence, int32_t position) const;
    // Frees the placed cells of a sequence before a position.
    void release_before(int32_t sequence, int32_t position);

    // A sequence's placed cells, in the order of their positions.
    const std::vector<cpu::CellSpan> & spans(int32_t sequence) const;

    // Shares the first n pages of a sequence, whose rows lie in the order of positions from 0 on.
    void share(int32_t sequence, int64_t n);
    // Pages that a sequence shares, in order.
    const std::vector<int64_t> & shared(int32_t sequence) const {
        return sequence_cells_[sequence].shared;
    }
    // Attaches shared pages to an empty sequence.
    void attach_pages(int32_t sequence, const std::vector<int64_t> & pages);
    // A free page becomes a shared one with rows from a position on; who asks for it holds it.
    // Throws DFL_STATUS_ARGUMENT if there is none.
    int64_t take_page(int32_t position);
    // Another one holds a shared page, or one no longer does.
    void hold(int64_t page) { ++holders_[page]; }
    void drop(int64_t page);
    // Sequences and others that hold a shared page.
    int32_t n_holders(int64_t page) const { return holders_[page]; }

    // Additive mask of one row over cells [first, first + n), float16: 0 where (sequence, position)
    // may look, else -inf. window: keys a row may see, itself included; 0: all. causal false: also
    // later positions, as far as the window reaches.
    void mask_row(int32_t sequence, int32_t position, int64_t window, bool causal, int64_t first,
                  int64_t n, ggml_fp16_t * row) const;

    // The cells that were taken, placed or released since the last call, ascending.
    std::vector<int64_t> take_changes();

  private:
    // The cells of one sequence.
    struct SequenceCells {
        std::vector<int64_t> shared;
        std::vector<int64_t> pages;               // its own, in the order in which they were taken
        int64_t next = 0;                         // no free cell of them is handed out before: page
                                                  // by page, PAGE places each
        mutable std::vector<cpu::CellSpan> spans; // ascending
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
    std::vector<int32_t> used_;                 // cells of each page that are held
    std::vector<int32_t> holders_;              // of each page that is shared; else 0
    std::vector<bool> is_claimed_;              // of each page
    std::vector<SequenceCells> sequence_cells_; // of each sequence
    std::vector<int64_t> changes_;              // some more than once
    int64_t n_unclaimed_ = 0;
    int64_t high_ = 0;
    int64_t n_reserved_ = 0;
    int64_t n_touched_ = 0;
    int64_t first_unclaimed_ = 0; // no such page lies below
};

} // namespace dfl
