#include "device/worker_threads.h"

#include <exception>
#include <vector>

namespace dfl {

void run_on_threads(int64_t n, const std::function<void()> & work,
                    const std::function<std::thread(const std::function<void()> &)> & start) {
    std::vector<std::thread> threads;
    threads.reserve(n > 1 ? n - 1 : 0); // push_back() must not throw while threads run
    try {
        for (int64_t i = 1; i < n; ++i) {
            threads.push_back(start(work));
        }
    } catch (const std::exception &) { // no memory or thread is left: run with fewer threads
    }
    work();
    for (std::thread & thread : threads) {
        thread.join();
    }
}

} // namespace dfl
