// Names the kernel and the instruction if an address is not mapped.
#pragma once

#include "warp.h"

namespace soft_gpu {

// Reports crashes of this thread as those of a kernel during its lifetime.
class CrashReport {
  public:
    explicit CrashReport(const Kernel & kernel);
    ~CrashReport();
    CrashReport(const CrashReport &) = delete;
    CrashReport & operator=(const CrashReport &) = delete;
};

// The warp that this thread runs.
extern thread_local const Warp * running_warp;

} // namespace soft_gpu
