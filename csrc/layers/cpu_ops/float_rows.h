// Access to rows of float32 tensors in host memory.
#pragma once

#include <cstdint>
#include <ggml.h>

namespace dfl {

inline float * row_of(const ggml_tensor * x, int64_t row, int64_t layer = 0) {
    return reinterpret_cast<float *>(static_cast<char *>(x->data) + row * x->nb[1] +
                                     layer * x->nb[2]);
}

// Returns the number of floats from one row to the next.
inline int64_t stride(const ggml_tensor * x) {
    return static_cast<int64_t>(x->nb[1] / sizeof(float));
}

// Prefetches n floats. Cache lines that another core wrote arrive late, but many can be in flight.
inline void fetch_early(const float * x, int64_t n) {
    constexpr int64_t line = 16;
    for (int64_t i = 0; i < n; i += line) {
        __builtin_prefetch(x + i);
    }
}

} // namespace dfl
