// Memory that kernels may touch.
#pragma once

#include "types.h"

namespace soft_gpu {

// Notes memory that the GPU may access: its own, and pinned memory of the host.
void allow_memory(const void * at, u64 bytes);
void forbid_memory(const void * at);
bool is_device_memory(u64 at, u64 bytes);

// True if SOFT_GPU_CHECK is set: every generic address is looked up.
bool is_checking_addresses();

} // namespace soft_gpu
