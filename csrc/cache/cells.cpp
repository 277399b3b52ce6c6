#include "cache/cells.h"

#include "error.h"

#include <algorithm>
#include <cmath>

namespace dfl {

std::vector<int64_t> CellTable::find_free(int64_t n) {
    DFL_CHECK(n <= n_free(), DFL_STATUS_ARGUMENT,
              "%lld rows do not fit: %lld of %lld cells are free", (long long)n,
              (long long)n_free(), (long long)size());
    std::vector<int64_t> cells;
    cells.reserve(n);
    for (int64_t cell = first_free_; static_cast<int64_t>(cells.size()) < n; ++cell) {
        if (sequence_[cell] == FREE) {
            cells.push_back(cell);
        }
    }
    if (n > 0) {
        first_free_ = cells.front();
        n_touched_ = std::max(n_touched_, cells.back() + 1);
    }
    return cells;
}

void CellTable::own(int64_t cell, int32_t sequence, int32_t position) {
    n_used_ += sequence_[cell] == FREE;
    sequence_[cell] = sequence;
    position_[cell] = position;
    high_ = std::max(high_, cell + 1);
    note_change(cell);
}

void CellTable::release(int64_t cell) {
    n_used_ -= sequence_[cell] != FREE;
    sequence_[cell] = FREE;
    position_[cell] = FREE;
    first_free_ = std::min(first_free_, cell);
    while (high_ > 0 && sequence_[high_ - 1] == FREE) {
        --high_;
    }
    note_change(cell);
}

void CellTable::release_from(int32_t sequence, int32_t position) {
    for (int64_t cell = high_ - 1; cell >= 0; --cell) {
        if (sequence_[cell] == sequence && position_[cell] >= position) {
            release(cell);
        }
    }
}

void CellTable::release_before(int32_t sequence, int32_t position) {
    for (int64_t cell = high_ - 1; cell >= 0; --cell) {
        if (sequence_[cell] == sequence && position_[cell] < position) {
            release(cell);
        }
    }
}

// A list longer than the table has duplicates.
void CellTable::note_change(int64_t cell) {
    if (changes_.size() >= 2 * sequence_.size()) {
        changes_ = take_changes();
    }
    changes_.push_back(cell);
}

std::vector<int64_t> CellTable::take_changes() {
    std::vector<int64_t> cells = std::move(changes_);
    changes_.clear();
    std::sort(cells.begin(), cells.end());
    cells.erase(std::unique(cells.begin(), cells.end()), cells.end());
    return cells;
}

void CellTable::mask_row(int32_t sequence, int32_t position, int64_t window, bool causal,
                         int64_t first, int64_t n, ggml_fp16_t * row) const {
    static const ggml_fp16_t hidden = ggml_fp32_to_fp16(-INFINITY);
    static const ggml_fp16_t visible = ggml_fp32_to_fp16(0.0f);
    const int32_t * seq = sequence_.data() + first;
    const int32_t * pos = position_.data() + first;
    const int64_t reach = window > 0 ? window - 1 : INT32_MAX;
    const auto oldest = static_cast<int32_t>(std::max<int64_t>(0, position - reach));
    const auto newest =
        causal ? position : static_cast<int32_t>(std::min<int64_t>(INT32_MAX, position + reach));
    for (int64_t cell = 0; cell < n; ++cell) {
        const bool sees = seq[cell] == sequence && pos[cell] >= oldest && pos[cell] <= newest;
        row[cell] = sees ? visible : hidden;
    }
}

} // namespace dfl
