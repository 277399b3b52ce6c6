// Reference-counted K/V rows of up to a page of positions: in a shared page, lent by the sequence
// that computed them, or on the host, where they are copied when it gives up their cells.
#pragma once

#include "cache/kv_group.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace dfl {

// Rows of positions side by side, within one page's worth of them.
class KvBlock : public std::enable_shared_from_this<KvBlock> {
  public:
    // The block of a shared page, which it holds from now on; the only one, see
    // KvGroup::blocks_by_page(). host_bytes: counts the bytes of all blocks.
    KvBlock(KvGroup & group, uint64_t & host_bytes, int64_t page);
    // n rows on the host, to be filled in by write() or, if an owner lends them, by copy_out().
    KvBlock(KvGroup & group, uint64_t & host_bytes, int32_t position, int64_t n,
            int32_t owner = -1);
    ~KvBlock();
    KvBlock(const KvBlock &) = delete; // the group counts who holds a page
    KvBlock & operator=(const KvBlock &) = delete;

    int32_t position() const { return position_; }
    int64_t n() const { return n_; }
    // -1: they are on the host.
    int64_t page() const { return page_; }
    bool is_full() const { return n_ == CellTable::PAGE; }
    uint64_t host_bytes() const { return n_bytes_; }
    // The sequence that lends its cells; -1: none.
    int32_t owner() const { return owner_; }
    // Copies them out of the owner's cells, for which there is memory.
    void copy_out();

    // True if no sequence uses the page, so that its cells are free once the block leaves it.
    bool is_idle() const { return page_ >= 0 && group_.cells().n_holders(page_) == 1; }
    // Number of prefixes that keep it in its page.
    int32_t n_keepers = 0;
    // Moves them to the host, and back into a page. Throws where there is no memory, or no page.
    void page_out();
    void page_in();
    // Copies the first of them into cells.
    void copy_to(const std::vector<int64_t> & cells);
    // Copies one tensor's rows out of them, and into them.
    void read(size_t tensor, uint8_t * to);
    void write(size_t tensor, const uint8_t * from);

  private:
    void allocate();
    void free_bytes();
    void move_to_page(int64_t page);
    void leave_page();
    // Offset of a row in the bytes of its tensor.
    size_t offset_of(size_t tensor) const;

    KvGroup & group_;
    uint64_t & host_bytes_;
    int32_t position_;
    int64_t n_;
    int64_t page_ = -1;
    int32_t owner_ = -1;
    std::unique_ptr<uint8_t[]> bytes_; // a vector would zero what is written anyway
    uint64_t n_bytes_ = 0;
};

} // namespace dfl
