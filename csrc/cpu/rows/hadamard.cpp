#include "cpu/rows/hadamard.h"

#include <cmath>

namespace dfl::cpu {

void hadamard(float * x, int64_t n, int64_t block) {
    const float unit = 1.0f / std::sqrt(static_cast<float>(block));
    for (float * at = x; at < x + n; at += block) {
        for (int64_t half = 1; half < block; half *= 2) {
            for (int64_t i = 0; i < block; i += 2 * half) {
                for (int64_t j = i; j < i + half; ++j) {
                    const float a = at[j], b = at[j + half];
                    at[j] = a + b;
                    at[j + half] = a - b;
                }
            }
        }
        for (int64_t i = 0; i < block; ++i) {
            at[i] *= unit;
        }
    }
}

} // namespace dfl::cpu
