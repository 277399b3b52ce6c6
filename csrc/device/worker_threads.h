// Work shared by several threads.
#pragma once

#include <cstdint>
#include <functional>
#include <thread>

namespace dfl {

// Calls work on n threads, one of them the caller's, and waits for all. There may be fewer threads,
// so work must take its parts from a shared counter. work must not throw. Tests replace `start`.
void run_on_threads(
    int64_t n, const std::function<void()> & work,
    const std::function<std::thread(const std::function<void()> &)> & start = [](const auto & run) {
        return std::thread(run);
    });

} // namespace dfl
