#include "cache/kv_block.h"

#include <algorithm>

namespace dfl {

static constexpr int64_t PAGE = CellTable::PAGE;

KvBlock::KvBlock(KvGroup & group, uint64_t & host_bytes, int64_t page)
    : group_(group), host_bytes_(host_bytes), position_(group.cells().position(page * PAGE)),
      n_(PAGE) {
    group_.cells().hold(page);
    move_to_page(page);
}

KvBlock::KvBlock(KvGroup & group, uint64_t & host_bytes, int32_t position, int64_t n, int32_t owner)
    : group_(group), host_bytes_(host_bytes), position_(position), n_(n), owner_(owner) {
    allocate();
    if (owner_ >= 0) {
        group_.lend(this);
    }
}

KvBlock::~KvBlock() {
    group_.end_loan(this);
    leave_page();
    free_bytes();
}

void KvBlock::move_to_page(int64_t page) {
    page_ = page;
    group_.register_block(page, this);
}

void KvBlock::leave_page() {
    if (page_ >= 0) {
        group_.unregister_block(page_);
        group_.cells().drop(page_);
        page_ = -1;
    }
}

void KvBlock::allocate() {
    const size_t n_bytes = n_ * group_.row_bytes();
    bytes_.reset(new uint8_t[n_bytes]);
    n_bytes_ = n_bytes;
    host_bytes_ += n_bytes_;
}

void KvBlock::free_bytes() {
    host_bytes_ -= n_bytes_;
    n_bytes_ = 0;
    bytes_.reset();
}

void KvBlock::copy_out() {
    if (owner_ >= 0) {
        group_.read_rows(owner_, position_, n_, bytes_.get());
        group_.end_loan(this);
        owner_ = -1;
    }
}

void KvBlock::page_out() {
    if (page_ < 0) {
        return;
    }
    allocate();
    group_.read_cells(page_ * PAGE, PAGE, bytes_.get());
    leave_page();
}

void KvBlock::page_in() {
    if (page_ >= 0) {
        return;
    }
    move_to_page(group_.cells().take_page(position_));
    group_.write_cells(page_ * PAGE, PAGE, bytes_.get(), 0, PAGE);
    free_bytes();
}

void KvBlock::copy_to(const std::vector<int64_t> & cells) {
    copy_out();
    const auto n = static_cast<int64_t>(cells.size());
    for (int64_t first = 0, end = 0; first < n; first = end) {
        do {
            ++end;
        } while (end < n && cells[end] == cells[end - 1] + 1);
        if (page_ >= 0) {
            group_.copy_cells({page_ * PAGE + first, cells[first], end - first});
        } else {
            group_.write_cells(cells[first], end - first, bytes_.get(), first, n_);
        }
    }
}

size_t KvBlock::offset_of(size_t tensor) const {
    size_t at = 0;
    for (size_t i = 0; i < tensor; ++i) {
        at += n_ * group_.tensors()[i]->nb[1];
    }
    return at;
}

void KvBlock::read(size_t tensor, uint8_t * to) {
    copy_out();
    const ggml_tensor * rows = group_.tensors()[tensor];
    const size_t row = rows->nb[1];
    if (page_ >= 0) {
        ggml_backend_tensor_get(rows, to, page_ * PAGE * row, n_ * row);
    } else {
        std::copy_n(bytes_.get() + offset_of(tensor), n_ * row, to);
    }
}

void KvBlock::write(size_t tensor, const uint8_t * from) {
    std::copy_n(from, n_ * group_.tensors()[tensor]->nb[1], bytes_.get() + offset_of(tensor));
}

} // namespace dfl
