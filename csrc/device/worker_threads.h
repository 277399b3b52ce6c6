// Work that several threads share.
#pragma once

#include <cstdint>
#include <functional>
#include <thread>

namespace dfl {

// Calls work on n threads, the caller's among them, and returns when all are done. Where the system
// gives no more threads there are fewer: work takes its share from a counter until nothing is left.
// work must not throw. start: for tests.
void run_on_threads(
    int64_t n, const std::function<void()> & work,
    const std::function<std::thread(const std::function<void()> &)> & start = [](const auto & run) {
        return std::thread(run);
    });

} // namespace dfl
