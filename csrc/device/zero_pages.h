// Zeroed host memory that takes physical memory only where it is written to.
#pragma once

#include <cstdint>
#include <memory>

namespace dfl {

// Reserves zeroed, page-aligned memory; NULL if the system has none.
std::shared_ptr<void> zero_pages(uint64_t bytes);

// Returns the bytes of reserved pages not written to yet, which free memory must still provide.
uint64_t untouched_bytes();

} // namespace dfl
