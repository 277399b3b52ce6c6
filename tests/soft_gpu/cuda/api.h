// What the libraries of the software GPU share: exported functions, counters and loud failures.
#pragma once

#include "../error.h"
#include "cuda_common.h"

#include <string>

namespace soft_gpu {

// Prints the reason and ends the process.
[[noreturn]] void fail(const std::string & why);

// Copies the arguments, which the caller may change, and enqueues the kernel.
cudaError_t launch(const void * host_function, const Configuration & size, void ** arguments,
                   bool is_cooperative);

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
