// One head of a Gated DeltaNet layer: what enters its rule, the rule along the paths of a tree, and
// what leaves it. A node's result depends on its own path alone and has the same bits whatever
// other nodes there are, and whether a path is scanned to verify, to append or to promote.
#pragma once

#include <cstdint>

namespace dfl::cpu {

// A depthwise causal convolution and silu of d channels, n rows.
struct DeltaConvolution {
    int64_t d, n, d_conv;
    const float * past; // [d], d_conv - 1 committed rows, past_row apart
    const float * u;    // [d], n new rows, u_row apart
    int64_t past_row, u_row;
    // [n, d_conv]: the rows of (committed ++ new) under each tap; NULL: each row follows the last
    const int32_t * taps;
    const float * kernel; // [d_conv, d]
    float * out;          // [d], n rows, out_row apart
    int64_t out_row;
};

// The rule over n rows, with the state S as [d (keys), d (values)]:
//   S <- exp(g) S;  S += beta k (v - S k);  out = S q
struct DeltaScan {
    int64_t d, n;
    const float * q; // [d], n rows, qk_row apart; NULL: only the state is wanted
    const float * k; // [d], the same
    const float * v; // [d], n rows, v_row apart
    int64_t qk_row, v_row;
    const float * decay; // exp(g) of row i at i * gate_row
    const float * beta;
    int64_t gate_row;
    const float * qk; // [n]: q * k
    // [n]: -1, or an earlier row; NULL: each row follows the last
    const int32_t * parents;
    const float * state; // [d, d]
    float * last_state;  // [d, d], may be `state`: after the last row; NULL: not wanted
    float * out;         // [d], n rows, out_row apart
    int64_t out_row;
};

// out <- norm(out) * weight * silu(gate) of one row of d values.
struct DeltaGate {
    int64_t d;
    const float * weight;
    const float * gate;
    float eps;
    float * out;
};

// Rows whose gates are computed at once.
constexpr int64_t DELTA_GATES = 16;

// Of DELTA_GATES rows: decay = exp(g), g = a softplus(x + bias); beta = sigmoid(y).
struct DeltaGates {
    float a, bias;
    const float *x, *y;
    float *decay, *beta;
};

struct DeltaHeadKernel {
    void (*convolve)(const DeltaConvolution & work);
    // to <- x * length / sqrt(sum(x^2) + eps)
    void (*scale)(const float * x, int64_t d, float length, float eps, float * to);
    float (*dot)(const float * a, const float * g, int64_t d);
    // Floats of scratch for a scan along parents.
    int64_t (*scratch_size)(int64_t d, int64_t n);
    void (*scan)(const DeltaScan & work, float * scratch);
    void (*gate)(const DeltaGate & work);
    void (*gates)(const DeltaGates & work);
};

// Most taps of a convolution and values of a head.
constexpr int64_t MAX_DELTA_TAPS = 16, MAX_DELTA_HEAD = 1024;

// The best one for this CPU.
const DeltaHeadKernel * delta_head();

} // namespace dfl::cpu
