// The error that ends a run: a GPU that continues with wrong data is worse than none.
#pragma once

#include <stdexcept>
#include <string>

namespace soft_gpu {

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline void require(bool condition, const std::string & message) {
    if (!condition) {
        throw Error(message);
    }
}

} // namespace soft_gpu
