// Runs a kernel over its grid.
#pragma once

#include "block.h"

namespace soft_gpu {

constexpr u32 MAX_SHARED_BYTES = 99 << 10, MAX_BLOCK_THREADS = 1024;

// Runs all blocks to their end, on several threads of the host. Throws Error at the first failure.
void run(const Launch & launch);

} // namespace soft_gpu
