#include "cache/cell_table.h"

#include "error.h"

#include <algorithm>
#include <cmath>

namespace dfl {

CellTable::CellTable(int64_t n_cells, int32_t n_sequences, bool packs)
    : packs_(packs), sequence_(n_cells, FREE), position_(n_cells, FREE),
      used_((n_cells + PAGE - 1) / PAGE, 0), holders_(used_.size(), 0),
      is_claimed_(used_.size(), false), sequence_cells_(n_sequences), n_unclaimed_(n_cells) {}

void CellTable::reserve_last() {
    n_reserved_ = 1;
    --n_unclaimed_;
}

int64_t CellTable::page_size(int64_t page) const { return std::min(PAGE, size() - page * PAGE); }

int64_t CellTable::cells_needed(int32_t sequence, int64_t n) const {
    const SequenceCells & owned = sequence_cells_[sequence];
    for (int64_t at = owned.next; n > 0 && at < static_cast<int64_t>(owned.pages.size()) * PAGE;
         ++at) {
        const int64_t page = owned.pages[at / PAGE];
        n -= at % PAGE < page_size(page) && sequence_[page * PAGE + at % PAGE] == FREE;
    }
    return (n + PAGE - 1) / PAGE * PAGE;
}

bool CellTable::may_claim(int64_t page) const {
    return page < n_pages() && !is_claimed_[page] && page_size(page) > 0;
}

int64_t CellTable::claim_lowest() {
    while (is_claimed_[first_unclaimed_]) {
        ++first_unclaimed_;
    }
    is_claimed_[first_unclaimed_] = true;
    n_unclaimed_ -= page_size(first_unclaimed_);
    return first_unclaimed_;
}

// Claims the page after the sequence's last page if it is free, else the lowest free page.
void CellTable::claim_page(SequenceCells & owned) {
    const std::vector<int64_t> & last = owned.pages.empty() ? owned.shared : owned.pages;
    const int64_t next = last.empty() || packs_ ? n_pages() : last.back() + 1;
    if (!may_claim(next)) {
        owned.pages.push_back(claim_lowest());
        return;
    }
    is_claimed_[next] = true;
    n_unclaimed_ -= page_size(next);
    owned.pages.push_back(next);
}

void CellTable::free_page(int64_t page) {
    is_claimed_[page] = false;
    n_unclaimed_ += page_size(page);
    first_unclaimed_ = std::min(first_unclaimed_, page);
}

void CellTable::lower_high() {
    while (high_ > 0 && sequence_[high_ - 1] == FREE) {
        --high_;
    }
}

std::vector<int64_t> CellTable::take(int32_t sequence, int64_t n) {
    SequenceCells & owned = sequence_cells_[sequence];
    std::vector<int64_t> cells;
    cells.reserve(n);
    int64_t at = owned.next;
    for (; static_cast<int64_t>(cells.size()) < n; ++at) {
        if (at >= static_cast<int64_t>(owned.pages.size()) * PAGE) {
            if (n_unclaimed_ <= 0) {
                const auto n_taken = static_cast<int64_t>(cells.size());
                std::for_each(cells.rbegin(), cells.rend(), [&](int64_t cell) { release(cell); });
                throw Error(
                    DFL_STATUS_ARGUMENT,
                    format("%lld rows do not fit into the K/V cache: %lld of %lld cells are free",
                           (long long)n, (long long)n_taken, (long long)size()));
            }
            claim_page(owned);
        }
        const int64_t page = owned.pages[at / PAGE], cell = page * PAGE + at % PAGE;
        if (at % PAGE >= page_size(page) || sequence_[cell] != FREE) {
            continue;
        }
        sequence_[cell] = sequence;
        ++used_[page];
        high_ = std::max(high_, cell + 1);
        n_touched_ = std::max(n_touched_, cell + 1);
        record_change(cell);
        cells.push_back(cell);
    }
    owned.next = at;
    return cells;
}

void CellTable::add_to_spans(SequenceCells & owned, int64_t cell, int64_t position) {
    if (!owned.spans_valid) {
        return;
    }
    if (owned.spans.empty()) {
        owned.spans.push_back({position, cell, 1});
        return;
    }
    cpu::CellSpan & last = owned.spans.back();
    const int64_t end = last.position + last.n;
    if (position == end && cell == last.cell + last.n) {
        ++last.n;
    } else if (position >= end) {
        owned.spans.push_back({position, cell, 1});
    } else {
        owned.spans_valid = false;
    }
}

void CellTable::drop_from_spans(SequenceCells & owned, int64_t cell, int64_t position) {
    if (!owned.spans_valid) {
        return;
    }
    cpu::CellSpan & first = owned.spans.front();
    cpu::CellSpan & last = owned.spans.back();
    if (last.cell + last.n - 1 == cell && last.position + last.n - 1 == position) {
        if (--last.n == 0) {
            owned.spans.pop_back();
        }
    } else if (first.cell == cell && first.position == position) {
        ++first.cell;
        ++first.position;
        if (--first.n == 0) {
            owned.spans.erase(owned.spans.begin());
        }
    } else {
        owned.spans_valid = false;
    }
}

const std::vector<cpu::CellSpan> & CellTable::spans(int32_t sequence) const {
    const SequenceCells & owned = sequence_cells_[sequence];
    if (owned.spans_valid) {
        return owned.spans;
    }
    owned.spans.clear();
    const auto add = [&](int64_t position, int64_t cell, int64_t n) {
        cpu::CellSpan * last = owned.spans.empty() ? nullptr : &owned.spans.back();
        if (last != nullptr && last->position + last->n == position &&
            last->cell + last->n == cell) {
            last->n += n;
        } else {
            owned.spans.push_back({position, cell, n});
        }
    };
    for (size_t i = 0; i < owned.shared.size(); ++i) {
        add(static_cast<int64_t>(i) * PAGE, owned.shared[i] * PAGE, PAGE);
    }
    for (const int64_t page : owned.pages) {
        for (int64_t cell = page * PAGE; cell < page * PAGE + page_size(page); ++cell) {
            if (sequence_[cell] == sequence && position_[cell] != FREE) {
                add(position_[cell], cell, 1);
            }
        }
    }
    std::sort(
        owned.spans.begin(), owned.spans.end(),
        [](const cpu::CellSpan & a, const cpu::CellSpan & b) { return a.position < b.position; });
    owned.spans_valid = true;
    return owned.spans;
}

void CellTable::place(int64_t cell, int32_t position) {
    SequenceCells & owned = sequence_cells_[sequence_[cell]];
    if (position_[cell] != FREE) {
        drop_from_spans(owned, cell, position_[cell]);
    }
    position_[cell] = position;
    add_to_spans(owned, cell, position);
    record_change(cell);
}

void CellTable::free_cell(int64_t cell, bool may_be_handed_out) {
    if (sequence_[cell] == FREE) {
        return;
    }
    SequenceCells & owned = sequence_cells_[sequence_[cell]];
    if (position_[cell] != FREE) {
        drop_from_spans(owned, cell, position_[cell]);
    }
    sequence_[cell] = FREE;
    position_[cell] = FREE;
    const int64_t page = cell / PAGE;
    // Released cells were mostly taken last, so search the newest pages first.
    auto at = std::find(owned.pages.rbegin(), owned.pages.rend(), page);
    const int64_t index = owned.pages.rend() - at - 1;
    if (--used_[page] == 0) {
        owned.pages.erase(owned.pages.begin() + index);
        free_page(page);
        const int64_t begin = index * PAGE;
        owned.next = owned.next >= begin + PAGE ? owned.next - PAGE : std::min(owned.next, begin);
    } else if (may_be_handed_out) {
        owned.next = std::min(owned.next, index * PAGE + cell % PAGE);
    }
    lower_high();
    record_change(cell);
}

void CellTable::release(int64_t cell) { free_cell(cell, true); }

bool CellTable::can_release_from(int32_t sequence, int32_t position) const {
    const std::vector<int64_t> & pages = sequence_cells_[sequence].shared;
    const int64_t index = position / PAGE;
    if (position % PAGE == 0 || index >= static_cast<int64_t>(pages.size())) {
        return true;
    }
    const auto has_one = [&](int64_t page) { return holders_[page] == 1; };
    return n_unclaimed_ > 0 || std::any_of(pages.begin() + index, pages.end(), has_one) ||
           !sequence_cells_[sequence].pages.empty();
}

CellTable::Copy CellTable::release_from(int32_t sequence, int32_t position) {
    DFL_CHECK(can_release_from(sequence, position), DFL_STATUS_ARGUMENT,
              "going back to position %d takes a page of K/V cells, and none of %lld is free",
              position, (long long)n_pages());
    SequenceCells & owned = sequence_cells_[sequence];
    const auto own = static_cast<int64_t>(owned.shared.size()) * PAGE;
    const std::vector<cpu::CellSpan> spans_before = spans(sequence);
    for (auto span = spans_before.rbegin(); span != spans_before.rend(); ++span) {
        for (int64_t i = span->n - 1;
             i >= 0 && span->position + i >= std::max<int64_t>(own, position); --i) {
            free_cell(span->cell + i, true);
        }
    }
    if (position >= own) {
        return {0, 0, 0};
    }
    owned.spans_valid = false;
    while (static_cast<int64_t>(owned.shared.size()) * PAGE >= position + PAGE) {
        drop(owned.shared.back());
        owned.shared.pop_back();
    }
    const int64_t n = position % PAGE;
    if (n == 0) {
        return {0, 0, 0};
    }
    DFL_CHECK(owned.pages.empty(), DFL_STATUS_INTERNAL,
              "sequence %d has uncommitted K/V cells after position %d", sequence, position);
    const int64_t from = owned.shared.back();
    owned.shared.pop_back();
    if (holders_[from] == 1) { // the sequence is the page's only holder
        holders_[from] = 0;
        owned.pages.push_back(from);
        owned.next = n;
        for (int64_t i = 0; i < PAGE; ++i) {
            const int64_t cell = from * PAGE + i;
            sequence_[cell] = i < n ? sequence : FREE;
            position_[cell] = i < n ? position_[cell] : FREE;
            record_change(cell);
        }
        used_[from] = static_cast<int32_t>(n);
        lower_high();
        return {0, 0, 0};
    }
    drop(from);
    const std::vector<int64_t> cells = take(sequence, n);
    for (int64_t i = 0; i < n; ++i) {
        place(cells[i], static_cast<int32_t>(position - n + i));
    }
    return {from * PAGE, cells[0], n};
}

void CellTable::share(int32_t sequence, int64_t n) {
    SequenceCells & owned = sequence_cells_[sequence];
    const auto first = static_cast<int64_t>(owned.shared.size());
    DFL_CHECK(n - first <= static_cast<int64_t>(owned.pages.size()), DFL_STATUS_INTERNAL,
              "%lld pages cannot be shared, the sequence has %zu", (long long)(n - first),
              owned.pages.size());
    for (int64_t i = first; i < n; ++i) {
        const int64_t page = owned.pages[i - first];
        DFL_CHECK(page_size(page) == PAGE, DFL_STATUS_INTERNAL,
                  "page %lld of the K/V cache is not a whole page, it cannot be shared",
                  (long long)page);
        for (int64_t at = 0; at < PAGE; ++at) {
            const int64_t cell = page * PAGE + at;
            DFL_CHECK(sequence_[cell] == sequence && position_[cell] == i * PAGE + at,
                      DFL_STATUS_INTERNAL, "K/V cell %lld does not hold position %lld",
                      (long long)cell, (long long)(i * PAGE + at));
            sequence_[cell] = SHARED;
        }
        holders_[page] = 1;
        owned.shared.push_back(page);
    }
    if (n > first) {
        owned.pages.erase(owned.pages.begin(), owned.pages.begin() + (n - first));
        owned.next = std::max<int64_t>(0, owned.next - (n - first) * PAGE);
    }
}

void CellTable::attach_pages(int32_t sequence, const std::vector<int64_t> & pages) {
    SequenceCells & owned = sequence_cells_[sequence];
    DFL_CHECK(owned.shared.empty() && owned.pages.empty(), DFL_STATUS_INTERNAL,
              "sequence %d is not empty", sequence);
    owned.shared = pages;
    owned.spans_valid = false;
    std::for_each(pages.begin(), pages.end(), [&](int64_t page) { hold(page); });
}

int64_t CellTable::take_page(int32_t position) {
    if (n_unclaimed_ < PAGE) {
        throw Error(DFL_STATUS_ARGUMENT,
                    format("none of the %lld pages of K/V cells is free", (long long)n_pages()));
    }
    const int64_t page = claim_lowest();
    for (int64_t i = 0; i < PAGE; ++i) {
        sequence_[page * PAGE + i] = SHARED;
        position_[page * PAGE + i] = position + static_cast<int32_t>(i);
        record_change(page * PAGE + i);
    }
    used_[page] = PAGE;
    holders_[page] = 1;
    high_ = std::max(high_, (page + 1) * PAGE);
    n_touched_ = std::max(n_touched_, high_);
    return page;
}

void CellTable::drop(int64_t page) {
    if (--holders_[page] > 0) {
        return;
    }
    for (int64_t cell = page * PAGE; cell < (page + 1) * PAGE; ++cell) {
        sequence_[cell] = FREE;
        position_[cell] = FREE;
        record_change(cell);
    }
    used_[page] = 0;
    free_page(page);
    lower_high();
}

// Tables that do not pack reuse freed cells only when their whole page is free, so that the cells
// of an advancing sequence stay in order.
void CellTable::release_before(int32_t sequence, int32_t position) {
    if (const auto & all = spans(sequence); all.empty() || all.front().position >= position) {
        return;
    }
    const std::vector<cpu::CellSpan> spans_before = spans(sequence);
    for (const cpu::CellSpan & span : spans_before) {
        for (int64_t i = 0; i < span.n && span.position + i < position; ++i) {
            free_cell(span.cell + i, packs_);
        }
    }
}

// Adds a cell to the list of changed cells, which drops duplicates at twice the number of cells.
void CellTable::record_change(int64_t cell) {
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
    const ggml_fp16_t hidden = ggml_fp32_to_fp16(-INFINITY);
    const ggml_fp16_t visible = ggml_fp32_to_fp16(0.0f);
    const int32_t * seq = sequence_.data() + first;
    const int32_t * pos = position_.data() + first;
    const int64_t reach = window > 0 ? window - 1 : INT32_MAX;
    const auto oldest = static_cast<int32_t>(std::max<int64_t>(0, position - reach));
    const auto newest =
        causal ? position : static_cast<int32_t>(std::min<int64_t>(INT32_MAX, position + reach));
    // This loop has no branches, so that the compiler vectorises it: prefills fill rows x cells.
    for (int64_t cell = 0; cell < n; ++cell) {
        const bool sees = (seq[cell] == sequence) & (pos[cell] >= oldest) & (pos[cell] <= newest);
        row[cell] = sees ? visible : hidden;
    }
}

} // namespace dfl
