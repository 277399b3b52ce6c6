// What the libraries of the software GPU share: exported functions, counters and loud failures.
#pragma once

#include "../error.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace soft_gpu {

// Counters in the order of COUNTS in scripts/gpu/null_gpu.py, then others.
struct Counts {
    std::atomic<int64_t> used_bytes, peak_bytes, allocations, pinned_bytes, kernels,
        captured_kernels, captures, graph_launches, graph_updates, cublas_calls, synchronizations,
        copies_to_gpu, bytes_to_gpu, copies_to_host, bytes_to_host;
    std::atomic<int64_t> replayed_nodes, failed_updates;
};
Counts & counts();

// Prints the reason and ends the process.
[[noreturn]] void fail(const std::string & why);

// Calls a body whose exceptions must not reach C, and ends the process if it throws.
template <class Body>
auto loudly(Body && body) {
    try {
        return body();
    } catch (const std::exception & error) {
        fail(error.what());
    }
}

} // namespace soft_gpu
