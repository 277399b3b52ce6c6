// Reference-counted K/V rows of at most a page of positions: in a shared page, in the cells of the
// sequence that computed them (the owner), or on the host.
#pragma once

#include "cache/kv_group.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace dfl {

class KvBlock : public std::enable_shared_from_this<KvBlock> {
  public:
    // Creates the only block of a shared page and holds the page. host_bytes: counter of the host
    // bytes of all blocks.
    KvBlock(KvGroup & group, uint64_t & host_bytes, int64_t page);
    // Creates a block of n rows on the host, filled by write(). With an owner, a sequence that
    // lends its rows, copy_out() fills the block.
    KvBlock(KvGroup & group, uint64_t & host_bytes, int32_t position, int64_t n,
            int32_t owner = -1);
    ~KvBlock();
    KvBlock(const KvBlock &) = delete; // a copied block would not count as a holder of the page
    KvBlock & operator=(const KvBlock &) = delete;

    int32_t position() const { return position_; }
    int64_t n() const { return n_; }
    // Returns the shared page with the block's rows, or -1 if they are not in a page.
    int64_t page() const { return page_; }
    bool is_full() const { return n_ == CellTable::PAGE; }
    uint64_t host_bytes() const { return n_bytes_; }
    // Returns the sequence whose cells hold the block's rows, or -1.
    int32_t owner() const { return owner_; }
    // Copies the block's rows from the owner's cells to host memory, which is allocated already.
    void copy_out();

    // True if no sequence holds the page, so that page_out() frees its cells.
    bool is_idle() const { return page_ >= 0 && group_.cells().n_holders(page_) == 1; }
    // Number of prefixes that keep the block in its page.
    int32_t n_keepers = 0;
    // Move the K/V rows to the host (throws without memory) and back (throws without a free page).
    void page_out();
    void page_in();
    // Copies the K/V of the block's first positions into cells, one cell for each position.
    void copy_to(const std::vector<int64_t> & cells);
    // Copy the block's rows of one tensor (K or V of a layer) to memory, or from memory.
    void read(size_t tensor, uint8_t * to);
    void write(size_t tensor, const uint8_t * from);

  private:
    void allocate();
    void free_bytes();
    void move_to_page(int64_t page);
    void leave_page();
    size_t offset_of(size_t tensor) const;

    KvGroup & group_;
    uint64_t & host_bytes_;
    int32_t position_;
    int64_t n_;
    int64_t page_ = -1;
    int32_t owner_ = -1;
    std::unique_ptr<uint8_t[]> bytes_; // rows on the host; std::vector would zero the memory first
    uint64_t n_bytes_ = 0;
};

} // namespace dfl
