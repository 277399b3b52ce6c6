// Attention layers that keep the same rows of every sequence, in the same cells.
#pragma once

#include "cache/cell_masks.h"
#include "cache/visible_cells.h"

#include <cstdint>
#include <map>
#include <vector>

namespace dfl {

class KvBlock;

// Layers with the same window and cells. Sequences keep their window and REACH positions before it,
// so that going back to a nearby prefix needs no copy.
class KvGroup {
  public:
    // Number of positions before its window that a sequence keeps: about a short answer that a user
    // may want to have regenerated.
    static constexpr int64_t REACH = CellTable::PAGE;

    // Largest number of uncommitted rows, including pending verifies and padding.
    struct UncommittedRows {
        int64_t per_sequence, total;
    };
    // Returns a number of cells with which CellTable::take() never fails. is_host: all K/V in host
    // memory. Between passes a sequence keeps at most window + REACH + PAGE - 2 positions, where
    // REACH is how far a sequence may go back without recomputing; they begin at a page's start. It
    // claims a page only when its pages are full, so u uncommitted rows need less than u + PAGE
    // cells more. In host memory a commit moves rows together and so frees whole pages; elsewhere a
    // sequence may keep all pages of its largest pass.
    static int64_t cells_needed(int64_t window, int32_t n_sequences, const UncommittedRows & rows,
                                bool is_host) {
        const int64_t retained = window - 1 + REACH + 2 * (CellTable::PAGE - 1);
        return is_host ? n_sequences * retained + rows.total
                       : n_sequences * (retained + rows.per_sequence);
    }

    // window: positions a row attends to, its own included; 0: all. attends_on_host: some layer
    // runs our own CPU attention.
    KvGroup(int64_t window, CellTable cells, CellMasks masks, bool attends_on_host);
    // Adds a layer's K and V, [head_dim * n_head_kv, n_cells] each.
    void add_layer(const Backend & backend, ggml_tensor * k, ggml_tensor * v);

    int64_t window() const { return window_; }
    bool has_layers() const { return !tensors_.empty(); }
    CellTable & cells() { return cells_; }
    const CellTable & cells() const { return cells_; }
    CellMasks & masks() { return masks_; }
    const CellMasks & masks() const { return masks_; }
    const std::vector<VisibleRows> & visible() const { return visible_; }
    // Updates the masks and visible() for the rows of the next pass, over the first n_kv cells.
    void set_rows(const MaskRows & rows, int64_t n_kv);

    bool is_host() const { return is_host_; }
    // Zeroes K/V rows of a sequence and of free cells, except memory that was never written to.
    void clear(int32_t sequence);
    void clear_cell(int64_t cell) { zero(cell, 1); }

    // Release cells of a sequence, after copying lent rows to the host. If a shared page is
    // released in part, copy its other rows to a page of the sequence.
    void release_from(int32_t sequence, int32_t position);
    void release_before(int32_t sequence, int32_t position);
    // Lends rows of a sequence to a block until the sequence releases their cells.
    void lend(KvBlock * block) { lent_.push_back(block); }
    void end_loan(KvBlock * block);
    const std::map<int64_t, KvBlock *> & blocks_by_page() const { return blocks_by_page_; }
    void register_block(int64_t page, KvBlock * block) { blocks_by_page_[page] = block; }
    void unregister_block(int64_t page) { blocks_by_page_.erase(page); }

    // True if sequences may share pages: without a window, and if our own CPU attention reads all
    // K/V, because it skips cells that a row does not see. Masks exclude sharing.
    bool shares_pages() const { return window_ == 0 && masks_.empty() && is_host(); }
    const std::vector<ggml_tensor *> & tensors() const { return tensors_; }
    // Returns the bytes of one cell, summed over all layers.
    uint64_t row_bytes() const;
    // Copy rows between cells and the host, where each tensor's rows are adjacent. read_rows()
    // needs all n rows of the sequence; write_cells() takes rows [first, first + n) of a host copy
    // of n_from rows.
    void read_rows(int32_t sequence, int32_t position, int64_t n, uint8_t * to) const;
    void read_cells(int64_t cell, int64_t n, uint8_t * to) const;
    void write_cells(int64_t cell, int64_t n, const uint8_t * from, int64_t first, int64_t n_from);
    // Copies rows between cells, in host memory only.
    void copy_cells(const CellTable::Copy & copy);

    // Releases the rows of a sequence at `position` that have left its window.
    void slide_window(int32_t sequence, int64_t position) {
        release_before(sequence, static_cast<int32_t>(first_retained(position)));
    }
    // Returns the first position in a snapshot taken at `position`: the start of a page, so that
    // restored rows are laid out like computed rows.
    int64_t first_saved(int64_t position) const;

  private:
    void zero(int64_t first, int64_t n);
    // Copies lent rows of positions [first, end) to the host.
    void copy_out_lent(int32_t sequence, int64_t first, int64_t end);
    // Returns the first position visible to a row at `position`.
    int64_t first_visible(int64_t position) const;
    // Returns the first position that stays in cells: the start of a page, to free whole pages.
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
