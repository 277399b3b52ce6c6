#include "cache/kv_group.h"

#include "cache/kv_block.h"
#include "error.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace dfl {

KvGroup::KvGroup(int64_t window, CellTable cells, CellMasks masks, bool attends_on_host)
    : window_(window), cells_(std::move(cells)), masks_(std::move(masks)),
      attends_on_host_(attends_on_host) {}

void KvGroup::add_layer(const Backend & backend, ggml_tensor * k, ggml_tensor * v) {
    tensors_.insert(tensors_.end(), {k, v});
    is_host_ = is_host_ && backend.is_host();
}

void KvGroup::set_rows(const MaskRows & rows, int64_t n_kv) {
    if (masks_.empty()) {
        cells_.take_changes(); // without masks, nothing needs the list of changed cells
    } else {
        masks_.update(cells_, rows, n_kv);
    }
    if (attends_on_host_) {
        find_visible_cells(cells_, rows, visible_);
    }
}

void KvGroup::zero(int64_t first, int64_t n) {
    for (ggml_tensor * tensor : tensors_) {
        if (n > 0) {
            ggml_backend_tensor_memset(tensor, 0, first * tensor->nb[1], n * tensor->nb[1]);
        }
    }
}

void KvGroup::clear(int32_t sequence) {
    // First cell of a run of adjacent cells, which one call of the device zeroes.
    int64_t first = 0;
    for (int64_t cell = 0; cell <= cells_.n_touched(); ++cell) {
        const bool is_meant =
            cell < cells_.n_touched() &&
            (cells_.sequence(cell) == CellTable::FREE || cells_.sequence(cell) == sequence);
        if (!is_meant) {
            zero(first, cell - first);
            first = cell + 1;
        }
    }
    zero(cells_.size(), cells_.n_cells() - cells_.size());
}

void KvGroup::end_loan(KvBlock * block) {
    lent_.erase(std::remove(lent_.begin(), lent_.end(), block), lent_.end());
}

void KvGroup::copy_out_lent(int32_t sequence, int64_t first, int64_t end) {
    if (first >= end) {
        return;
    }
    std::vector<KvBlock *> lent; // copied list: a block copied to the host leaves lent_
    std::copy_if(lent_.begin(), lent_.end(), std::back_inserter(lent), [&](const KvBlock * block) {
        return block->owner() == sequence && block->position() < end &&
               block->position() + block->n() > first;
    });
    std::for_each(lent.begin(), lent.end(), [](KvBlock * block) { block->copy_out(); });
}

void KvGroup::release_from(int32_t sequence, int32_t position) {
    copy_out_lent(sequence, position, INT64_MAX);
    copy_cells(cells_.release_from(sequence, position));
}

void KvGroup::release_before(int32_t sequence, int32_t position) {
    copy_out_lent(sequence, 0, position);
    cells_.release_before(sequence, position);
}

uint64_t KvGroup::row_bytes() const {
    uint64_t sum = 0;
    for (const ggml_tensor * tensor : tensors_) {
        sum += tensor->nb[1];
    }
    return sum;
}

void KvGroup::read_rows(int32_t sequence, int32_t position, int64_t n, uint8_t * to) const {
    int64_t n_read = 0;
    for (const ggml_tensor * tensor : tensors_) {
        const size_t row = tensor->nb[1];
        for (const cpu::CellSpan & span : cells_.spans(sequence)) {
            const int64_t first = std::max<int64_t>(position, span.position);
            const int64_t end = std::min(position + n, span.position + span.n);
            if (first < end) {
                ggml_backend_tensor_get(tensor, to + (first - position) * row,
                                        (span.cell + first - span.position) * row,
                                        (end - first) * row);
                n_read += end - first;
            }
        }
        to += n * row;
    }
    DFL_CHECK(n_read == n * static_cast<int64_t>(tensors_.size()), DFL_STATUS_INTERNAL,
              "sequence %d does not hold K/V of all %lld positions from %d on", sequence,
              (long long)n, position);
}

void KvGroup::read_cells(int64_t cell, int64_t n, uint8_t * to) const {
    for (const ggml_tensor * tensor : tensors_) {
        ggml_backend_tensor_get(tensor, to, cell * tensor->nb[1], n * tensor->nb[1]);
        to += n * tensor->nb[1];
    }
}

void KvGroup::write_cells(int64_t cell, int64_t n, const uint8_t * from, int64_t first,
                          int64_t n_from) {
    for (ggml_tensor * tensor : tensors_) {
        const size_t row = tensor->nb[1];
        ggml_backend_tensor_set(tensor, from + first * row, cell * row, n * row);
        from += n_from * row;
    }
}

void KvGroup::copy_cells(const CellTable::Copy & copy) {
    if (copy.n == 0 || copy.from == copy.to) {
        return;
    }
    for (const ggml_tensor * tensor : tensors_) {
        auto * rows = static_cast<char *>(tensor->data);
        const size_t row = tensor->nb[1];
        std::memcpy(rows + copy.to * row, rows + copy.from * row, copy.n * row);
    }
}

static int64_t page_of(int64_t position) {
    return std::max<int64_t>(0, position) / CellTable::PAGE * CellTable::PAGE;
}

int64_t KvGroup::first_visible(int64_t position) const {
    return window_ > 0 ? std::max<int64_t>(0, position - window_ + 1) : 0;
}

int64_t KvGroup::first_saved(int64_t position) const { return page_of(first_visible(position)); }

int64_t KvGroup::first_retained(int64_t position) const {
    return window_ > 0 ? page_of(first_visible(position) - REACH) : 0;
}

} // namespace dfl
