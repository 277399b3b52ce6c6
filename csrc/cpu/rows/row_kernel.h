// Kernels for rows of floats before a product or cache. Rows do not affect each other's results.
#pragma once

#include <cstdint>

namespace dfl::cpu {

// Arguments of rotate(): normalises one head, then rotates its first values by the angles of a
// position (RoPE).
struct HeadRotation {
    const float * x; // values of the head, [d]
    int64_t d;
    const float * weight; // weight of the norm, [d]; NULL: no norm
    float eps;
    // Cosines and sines of the angles, [n_rotated], as halves or pairs like the rotated values.
    const float * rotated;
    int64_t n_rotated;
    bool pairs; // true: values 2 i and 2 i + 1 rotate together; false: i and i + n_rotated / 2
};

struct RowKernel {
    // swiglu() and gated() take row lengths n that are multiples of `lanes`, other functions any n.
    int lanes;
    // RMS norm: to <- x / sqrt(mean(x^2) + eps) * weight, for any n.
    void (*norm)(const float * x, int64_t n, const float * weight, float eps, float * to);
    // SwiGLU: to <- gate * sigmoid(gate) * up.
    void (*swiglu)(const float * gate, const float * up, int64_t n, float * to);
    // Sigmoid gate: to <- x * sigmoid(gate).
    void (*gated)(const float * x, const float * gate, int64_t n, float * to);
    void (*rotate)(const HeadRotation & work, float * to);
    void (*to_half)(const float * x, int64_t n, uint16_t * to);
    // Soft cap: to <- cap * tanh(x * scale); to may be x.
    void (*cap)(const float * x, int64_t n, float scale, float cap, float * to);
    // Returns the index of the first largest value; n if all are NaN.
    int64_t (*first_largest)(const float * x, int64_t n);
    // Returns ln(sum(exp(x))); NaN if the largest value is not finite.
    float (*log_sum_exp)(const float * x, int64_t n);
    // Sets max[i] to the largest of the i-th BLOCK values. Returns true if no value is NaN or +inf.
    bool (*maxima)(const float * x, int64_t n, float * max);
    // Returns sum(exp(x - max)); max is finite and no value is above max.
    double (*sum_exp)(const float * x, int64_t n, float max);
    // Computes sampling noise: sets bits[i] to the high 52 bits of mix(state + (first + i + 1) *
    // G), defined in csrc/sampling/sampler.h. Returns the largest bits[i].
    uint64_t (*noise)(uint64_t state, uint64_t first, int64_t n, uint64_t * bits);
};

// Number of values that share a maximum in maxima(), so that searches can skip all of them.
constexpr int64_t BLOCK = 64;

constexpr int64_t MAX_ROTATED_HEAD = 512;

// Returns the best row kernel for this CPU.
const RowKernel * row_kernel();

} // namespace dfl::cpu
