// Attention layers that keep the same rows of every sequence, in the same cells.
#pragma once

#include "cache/cell_masks.h"
#include "cache/visible_cells.h"

#include <cstdint>
#include <map>
#include <vector>

namespace dfl {

class KvBlock;

// Those of layers with a window stay only while rows to come may see them: of a sequence that has
// come to a position the window before it, and REACH positions more, so that it goes back to a
// prefix nearby without a copy.
class KvGroup {
  public:
    // Of a short answer that is asked for again.
    static constexpr int64_t REACH = CellTable::PAGE;

    // Largest number of uncommitted rows, pending verifies and padding among them: of one sequence,
    // and of all together.
    struct UncommittedRows {
        int64_t per_sequence, total;
    };
    // Number of cells with which CellTable::take() never fails for want of one. is_host: as below.
    //
    // Between passes a sequence holds positions from first_retained() on, which is the first of a
    // page: fewer than window + REACH + PAGE - 1. It takes a page when those that it has are full
    // (CellTable, packs), so in its pass u cells lie in fewer than u + PAGE cells of pages. In host
    // memory accepted rows are moved together, so that its cells are in the order of its positions
    // and whole pages leave with them: what holds in the pass holds after it. Elsewhere rows stay
    // where they are, and a sequence may keep as many pages as it had in its largest pass.
    static int64_t cells_needed(int64_t window, int32_t n_sequences, const UncommittedRows & rows,
                                bool is_host) {
        const int64_t retained = window - 1 + REACH + 2 * (CellTable::PAGE - 1);
        return is_host ? n_sequences * retained + rows.total
                       : n_sequences * (retained + rows.per_sequence);
    }

    // window: 0, or as far back as a row of these layers sees, itself included. attends_on_host:
    // some layer does, in our own code.
    KvGroup(int64_t window, CellTable cells, CellMasks masks, bool attends_on_host);
    // A layer's rows, [head_dim * n_head_kv, n_cells] each.
    void add_layer(const Backend & backend, ggml_tensor * k, ggml_tensor * v);

    int64_t window() const { return window_; }
    bool has_layers() const { return !tensors_.empty(); }
    CellTable & cells() { return cells_; }
    const CellTable & cells() const { return cells_; }
    CellMasks & masks() { return masks_; }
    const CellMasks & masks() const { return masks_; }
    const std::vector<VisibleRows> & visible() const { return visible_; }
    // Makes the masks and visible() those of the rows of the next pass, over the first n_kv cells.
    void set_rows(const MaskRows & rows, int64_t n_kv);

    // True if all of it lies in host memory.
    bool is_host() const { return is_host_; }
    // Zeroes what is stored in the cells of a sequence and in those that nobody holds, and touches
    // no memory that was never written to; the table stays.
    void clear(int32_t sequence);
    void clear_cell(int64_t cell) { zero(cell, 1); }

    // CellTable::release_from() with the copies that it asks for, and release_before(). Lent rows
    // are copied to the host first.
    void release_from(int32_t sequence, int32_t position);
    void release_before(int32_t sequence, int32_t position);
    // Lends rows of a sequence to a block, until the sequence gives up their cells.
    void lend(KvBlock * block) { lent_.push_back(block); }
    void end_loan(KvBlock * block);
    // Blocks of shared pages, by page: at most one each.
    const std::map<int64_t, KvBlock *> & blocks_by_page() const { return blocks_by_page_; }
    void register_block(int64_t page, KvBlock * block) { blocks_by_page_[page] = block; }
    void unregister_block(int64_t page) { blocks_by_page_.erase(page); }

    // Whether sequences may share pages of cells: where every layer attends in our own code, which
    // takes rows where they lie, and to which hidden ones are nothing. Not for windows.
    bool shares_pages() const { return window_ == 0 && masks_.empty() && is_host(); }
    // Keys and values of each layer.
    const std::vector<ggml_tensor *> & tensors() const { return tensors_; }
    // Bytes of one cell in all of them.
    uint64_t row_bytes() const;
    // Copies rows out, tensor by tensor, those of each side by side: n of a sequence from a
    // position on, which must be there; of n cells side by side; and back, of n_from rows those
    // from `first` on.
    void read_rows(int32_t sequence, int32_t position, int64_t n, uint8_t * to) const;
    void read_cells(int64_t cell, int64_t n, uint8_t * to) const;
    void write_cells(int64_t cell, int64_t n, const uint8_t * from, int64_t first, int64_t n_from);
    // Host memory only.
    void copy_cells(const CellTable::Copy & copy);

    // What follows is for windows; without one all rows stay.

    // Forgets rows that have left the window of a sequence at a position.
    void slide_window(int32_t sequence, int64_t position) {
        release_before(sequence, static_cast<int32_t>(first_retained(position)));
    }
    // First position that a snapshot has for a row at a position: the first of a page, where it
    // lies as if it had been computed.
    int64_t first_saved(int64_t position) const;

  private:
    void zero(int64_t first, int64_t n);
    // Has blocks copy the rows of these positions that are lent to them.
    void copy_out_lent(int32_t sequence, int64_t first, int64_t end);
    // First position that a row at a position may attend to.
    int64_t first_visible(int64_t position) const;
    // First position that stays; the first of a page, so that whole pages become free.
    int64_t first_retained(int64_t position) const;

    int64_t window_;
    CellTable cells_;
    CellMasks masks_;
    bool attends_on_host_;
    std::vector<VisibleRows> visible_;
    std::vector<ggml_tensor *> tensors_;
    bool is_host_ = true;
    std::vector<KvBlock *> lent_;
    std::map<int64_t, KvBlock *> blocks_by_page_;
};

} // namespace dfl
