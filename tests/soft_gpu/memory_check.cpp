#include "memory_check.h"

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <shared_mutex>

namespace soft_gpu {

namespace {

std::shared_mutex mutex;
std::map<u64, u64> regions; // end by start
std::atomic<u64> version{1};

} // namespace

void allow_memory(const void * at, u64 bytes) {
    const std::unique_lock<std::shared_mutex> lock(mutex);
    regions[reinterpret_cast<u64>(at)] = reinterpret_cast<u64>(at) + bytes;
}

void forbid_memory(const void * at) {
    const std::unique_lock<std::shared_mutex> lock(mutex);
    regions.erase(reinterpret_cast<u64>(at));
    ++version;
}

bool is_device_memory(u64 at, u64 bytes) {
    // Lanes touch the same region, so the last one is tried first while none was forbidden.
    static thread_local u64 start = 1, end = 0, seen = 0;
    if (seen == version && at >= start && at + bytes <= end) {
        return true;
    }
    const std::shared_lock<std::shared_mutex> lock(mutex);
    const auto next = regions.upper_bound(at);
    if (next == regions.begin()) {
        return false;
    }
    start = std::prev(next)->first;
    end = std::prev(next)->second;
    seen = version;
    return at + bytes <= end;
}

bool is_checking_addresses() {
    static const bool checks = std::getenv("SOFT_GPU_CHECK") != nullptr;
    return checks;
}

} // namespace soft_gpu
