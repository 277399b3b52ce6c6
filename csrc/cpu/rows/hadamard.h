// The Walsh-Hadamard transform of rows on their way into quantised K/V, and back.
#pragma once

#include <cstdint>

namespace dfl::cpu {

// Multiplies each block of x [n] with the orthonormal matrix whose entry (i, j) has the sign of
// popcount(i & j). block: a power of two that divides n. Twice is no change, but for rounding.
void hadamard(float * x, int64_t n, int64_t block);

} // namespace dfl::cpu
