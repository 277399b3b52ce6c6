// Host memory that reads as zero and takes none until it is written to.
#pragma once

#include <cstdint>
#include <memory>

namespace dfl {

// Fresh pages of the system, page-aligned; NULL if it has none.
std::shared_ptr<void> zero_pages(uint64_t bytes);

// Bytes of all such pages that were promised and not yet taken: what is free must hold them too.
uint64_t untouched_bytes();

} // namespace dfl
