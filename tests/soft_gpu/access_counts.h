// Counts the memory accesses of each kernel, for SOFT_GPU_COUNT, and prints them at the end.
#pragma once

#include "warp.h"

#include <map>
#include <string>

namespace soft_gpu {

struct AccessCounts {
    u64 n_shared = 0;         // accesses of warps to shared memory
    u64 n_conflicts = 0;      // further cycles of these accesses by bank conflicts
    u64 n_global = 0;         // accesses of warps to other memory
    u64 global_bytes = 0;     // bytes that the lanes of these accesses asked for
    u64 n_global_sectors = 0; // sectors of 32 bytes that these accesses touched
};

// Adds the accesses that this thread makes during its lifetime to those of a kernel.
class AccessCounter {
  public:
    explicit AccessCounter(const Kernel & kernel);
    ~AccessCounter();
    AccessCounter(const AccessCounter &) = delete;
    AccessCounter & operator=(const AccessCounter &) = delete;

  private:
    const Kernel & kernel_;
};

bool is_counting();
// Counts one access of a warp; lanes: addresses of its lanes, of which active ones count.
void count_access(const Warp & warp, const u8 * const * lanes, u32 bytes);

} // namespace soft_gpu
