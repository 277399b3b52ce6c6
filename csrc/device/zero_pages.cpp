#include "device/zero_pages.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

namespace dfl {

// Bytes of all reservations by address. Never destroyed: reservations may outlive statics.
struct Promises {
    std::mutex mutex;
    std::map<void *, uint64_t> bytes;
};

static Promises & promises() {
    static auto * all = new Promises;
    return *all;
}

std::shared_ptr<void> zero_pages(uint64_t bytes) {
    void * pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) {
        return nullptr;
    }
    const std::lock_guard<std::mutex> lock(promises().mutex);
    promises().bytes[pages] = bytes;
    return {pages, [bytes](void * owned) {
                const std::lock_guard<std::mutex> last_lock(promises().mutex);
                promises().bytes.erase(owned);
                munmap(owned, bytes);
            }};
}

uint64_t untouched_bytes() {
    uint64_t untouched = 0;
#ifdef __linux__
    const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    std::vector<unsigned char> n_touched(1 << 16);
    const std::lock_guard<std::mutex> lock(promises().mutex);
    for (const auto & [first, bytes] : promises().bytes) {
        for (uint64_t done = 0; done < bytes; done += n_touched.size() * page) {
            const uint64_t size = std::min<uint64_t>(bytes - done, n_touched.size() * page);
            const uint64_t n_pages = (size + page - 1) / page;
            if (mincore(static_cast<char *>(first) + done, size, n_touched.data()) == 0) {
                untouched += page * std::count_if(n_touched.begin(), n_touched.begin() + n_pages,
                                                  [](unsigned char x) { return (x & 1) == 0; });
            }
        }
    }
#endif
    return untouched;
}

} // namespace dfl
