// Rows of float32 tensors that lie in host memory.
#pragma once

#include <cstdint>
#include <ggml.h>

namespace dfl {

inline float * row_of(const ggml_tensor * x, int64_t row, int64_t layer = 0) {
    return reinterpret_cast<float *>(static_cast<char *>(x->data) + row * x->nb[1] +
                                     layer * x->nb[2]);
}

// Floats from a row to the next.
inline int64_t stride(const ggml_tensor * x) {
    return static_cast<int64_t>(x->nb[1] / sizeof(float));
}

} // namespace dfl
