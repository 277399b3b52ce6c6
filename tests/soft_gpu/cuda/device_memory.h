// Memory of the software GPU.
//
// An allocation ends at a guard page and is filled with NaN; freed memory is unmapped.
#pragma once

#include <cstddef>
#include <cstdint>

namespace soft_gpu {

void * allocate(size_t bytes); // nullptr if the GPU has not as many
void release(void * at);

// Reserves addresses, which map() makes accessible memory.
void * reserve(size_t bytes);
void map(void * at, size_t bytes);
void unmap(void * at, size_t bytes);

} // namespace soft_gpu
