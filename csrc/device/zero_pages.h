// Zeroed host memory that takes physical memory only where it is written to.
#pragma once

#include <cstdint>
#include <memory>

namespace dfl {

// Fresh pages of the system, page-aligned; NULL if it has none.
std::shared_ptr<void> zero_pages(uint64_t bytes);

// Bytes of all such pages that were reserved and not yet written to; free memory must hold them
// too.
uint64_t untouched_bytes();

} // namespace dfl
