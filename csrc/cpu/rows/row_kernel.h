// Kernels for rows of floats on their way into a product or a cache. A row's result does not depend
// on the other rows.
#pragma once

#include <cstdint>

namespace dfl::cpu {

// One head: normed, its first values rotated by the angles of a position.
struct HeadRotation {
    const float * x; // [d]
    int64_t d;
    const float * weight; // [d] of the norm before; NULL: there is none
    float eps;
    // [n_rotated]: cosines and sines as the halves, or pairs, of a rotated (1, 0)
    const float * rotated;
    int64_t n_rotated;
    bool pairs; // values 2 i and 2 i + 1 rotate together, else i and i + n_rotated / 2
};

struct RowKernel {
    int lanes; // n of every row is a multiple of it, where not said otherwise
    // to <- x / sqrt(mean(x^2) + eps) * weight, of any n
    void (*norm)(const float * x, int64_t n, const float * weight, float eps, float * to);
    // to <- gate * sigmoid(gate) * up
    void (*swiglu)(const float * gate, const float * up, int64_t n, float * to);
    // to <- x * sigmoid(gate)
    void (*gated)(const float * x, const float * gate, int64_t n, float * to);
    // These take any n.
    void (*rotate)(const HeadRotation & work, float * to);
    void (*to_half)(const float * x, int64_t n, uint16_t * to);
    // to <- cap * tanh(x * scale); to may be x
    void (*cap)(const float * x, int64_t n, float scale, float cap, float * to);
    // Index of the first largest; n if there is none, as among NaNs.
    int64_t (*first_largest)(const float * x, int64_t n);
    // ln sum exp(x); NaN if that of the largest value is not finite.
    float (*log_sum_exp)(const float * x, int64_t n);
    // max[i] <- the largest of the i-th BLOCK values, the last block may be short; whether all
    // values are below +inf, and numbers.
    bool (*maxima)(const float * x, int64_t n, float * max);
    // sum exp(x - max), where none is above `max`, a finite number.
    double (*sum_exp)(const float * x, int64_t n, float max);
    // bits[i] <- the high 52 bits of mix(state + (first + i + 1) * G), as csrc/sampling/sampler.h
    // has them; the largest.
    uint64_t (*noise)(uint64_t state, uint64_t first, int64_t n, uint64_t * bits);
};

// Values of a row whose largest is looked at before they are.
constexpr int64_t BLOCK = 64;

// Most values of a head that rotate() takes.
constexpr int64_t MAX_ROTATED_HEAD = 512;

// The best one for this CPU.
const RowKernel * row_kernel();

} // namespace dfl::cpu
