// Walsh-Hadamard transform of rows before they enter a quantised K/V cache, and back.
#pragma once

#include <cstdint>

namespace dfl::cpu {

// Multiplies each block of x [n] by the orthonormal matrix of signs (-1)^popcount(i & j). block: a
// power of two that divides n. The transform is its own inverse, except for rounding.
void hadamard(float * x, int64_t n, int64_t block);

} // namespace dfl::cpu
