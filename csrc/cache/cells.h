// Which row lies in which cell of a K/V cache. A K or V row is position-free once rope is applied,
// so it may lie in any cell.
#pragma once

#include <cstdint>
#include <ggml.h>
#include <vector>

namespace dfl {

// The sequence that is decoded, as the table names it.
constexpr int32_t SEQUENCE = 0;

// Host table: cell -> (sequence, position).
class CellTable {
  public:
    static constexpr int32_t FREE = -1;

    explicit CellTable(int64_t n_cells) : sequence_(n_cells, FREE), position_(n_cells, FREE) {}

    int64_t size() const { return n_cells() - n_reserved_; }
    // With the cell that is out of use.
    int64_t n_cells() const { return static_cast<int64_t>(sequence_.size()); }
    // Takes the last cell out of use: padding may write there, and nobody sees it.
    void reserve_last() { n_reserved_ = 1; }
    // The first so many cells may have been written to, and so may the one that is out of use.
    int64_t n_touched() const { return n_touched_; }
    int64_t n_free() const { return size() - n_used_; }
    // One past the highest used cell.
    int64_t high() const { return high_; }
    // FREE where nobody owns the cell.
    int32_t sequence(int64_t cell) const { return sequence_[cell]; }
    int32_t position(int64_t cell) const { return position_[cell]; }

    // The n lowest free cells, to be written to; throws DFL_STATUS_ARGUMENT if there are fewer.
    std::vector<int64_t> find_free(int64_t n);
    void own(int64_t cell, int32_t sequence, int32_t position);
    void release(int64_t cell);
    // Frees the cells of a sequence from a position on.
    void release_from(int32_t sequence, int32_t position);
    // Frees the cells of a sequence before a position.
    void release_before(int32_t sequence, int32_t position);

    // Additive mask of one row over cells [first, first + n), float16: 0 where (sequence, position)
    // may look, else -inf. window: keys a row may see, itself included; 0: all. causal false: also
    // later positions, as far as the window reaches.
    void mask_row(int32_t sequence, int32_t position, int64_t window, bool causal, int64_t first,
                  int64_t n, ggml_fp16_t * row) const;

    // The cells that were owned or released since the last call, ascending.
    std::vector<int64_t> take_changes();

  private:
    void note_change(int64_t cell);

    std::vector<int32_t> sequence_;
    std::vector<int32_t> position_;
    std::vector<int64_t> changes_; // some more than once
    int64_t n_used_ = 0;
    int64_t high_ = 0;
    int64_t n_reserved_ = 0;
    int64_t n_touched_ = 0;
    int64_t first_free_ = 0; // no free cell lies below
};

} // namespace dfl
