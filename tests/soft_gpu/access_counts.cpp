#include "access_counts.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>

namespace soft_gpu {

namespace {

constexpr u64 SECTOR = 32, WORD = 4, N_BANKS = 32;

thread_local AccessCounts counts;

struct Totals {
    std::mutex mutex;
    std::map<std::string, AccessCounts> by_kernel;

    ~Totals() {
        for (const auto & [name, sum] : by_kernel) {
            std::fprintf(stderr,
                         "SOFT GPU COUNT: %s: shared %llu, conflicts %llu, global %llu, bytes "
                         "%llu, sectors %llu\n",
                         name.c_str(), static_cast<unsigned long long>(sum.n_shared),
                         static_cast<unsigned long long>(sum.n_conflicts),
                         static_cast<unsigned long long>(sum.n_global),
                         static_cast<unsigned long long>(sum.global_bytes),
                         static_cast<unsigned long long>(sum.n_global_sectors));
        }
    }
};

Totals & totals() {
    static Totals all;
    return all;
}

// Returns the further cycles of an access to shared memory. In one cycle the lanes may read one
// word of each bank, and at most 128 bytes in all.
u64 conflicts(const Warp & warp, const u8 * const * lanes, u32 bytes) {
    const int n_lanes = static_cast<int>(N_BANKS * WORD / std::max<u64>(bytes, WORD));
    u64 n = 0;
    for (int first = 0; first < N_LANES; first += n_lanes) {
        std::set<u64> banks[N_BANKS]; // words that lanes access
        for (int lane = first; lane < first + n_lanes; ++lane) {
            for (u64 at = 0; warp.is_active(lane) && at < bytes; at += WORD) {
                const u64 word = (reinterpret_cast<u64>(lanes[lane]) + at) / WORD;
                banks[word % N_BANKS].insert(word);
            }
        }
        size_t most = 1;
        for (const std::set<u64> & words : banks) {
            most = std::max(most, words.size());
        }
        n += most - 1;
    }
    return n;
}

} // namespace

AccessCounter::AccessCounter(const Kernel & kernel) : kernel_(kernel) { counts = {}; }

AccessCounter::~AccessCounter() {
    if (!is_counting()) {
        return;
    }
    const std::lock_guard<std::mutex> lock(totals().mutex);
    AccessCounts & sum = totals().by_kernel[kernel_.name];
    sum.n_shared += counts.n_shared;
    sum.n_conflicts += counts.n_conflicts;
    sum.n_global += counts.n_global;
    sum.global_bytes += counts.global_bytes;
    sum.n_global_sectors += counts.n_global_sectors;
}

bool is_counting() {
    static const bool is_set = std::getenv("SOFT_GPU_COUNT") != nullptr;
    return is_set;
}

void count_access(const Warp & warp, const u8 * const * lanes, u32 bytes) {
    std::set<u64> sectors;
    u64 n_lanes = 0, n_shared = 0;
    for (int lane = 0; lane < N_LANES; ++lane) {
        if (warp.is_active(lane)) {
            const u64 first = reinterpret_cast<u64>(lanes[lane]);
            ++n_lanes;
            n_shared += first - reinterpret_cast<u64>(warp.shared) < warp.shared_bytes;
            for (u64 at = first / SECTOR; at <= (first + bytes - 1) / SECTOR; ++at) {
                sectors.insert(at);
            }
        }
    }
    if (n_shared > 0) {
        ++counts.n_shared;
        counts.n_conflicts += conflicts(warp, lanes, bytes);
    } else if (n_lanes > 0) {
        ++counts.n_global;
        counts.global_bytes += n_lanes * bytes;
        counts.n_global_sectors += sectors.size();
    }
}

} // namespace soft_gpu
