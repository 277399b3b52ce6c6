// Kernels for one head of a Gated DeltaNet layer: convolution, delta rule along the paths of a
// tree, and output gate. A node's result depends on its own path alone and has the same bits beside
// any other nodes, and whether a path is scanned to verify, to append or to promote.
#pragma once

#include <cstdint>

namespace dfl::cpu {

// Depthwise causal convolution with SiLU, of d channels and n rows.
struct DeltaConvolution {
    int64_t d, n, d_conv;
    const float * past; // [d], d_conv - 1 committed rows, past_row floats apart
    const float * u;    // [d], n new rows, u_row floats apart
    int64_t past_row, u_row;
    // [n, d_conv]: index in (committed ++ new) rows under each tap; NULL: rows follow each other
    const int32_t * taps;
    const float * kernel; // [d_conv, d]
    float * out;          // [d], n rows, out_row floats apart
    int64_t out_row;
};

// Delta rule over n rows, with the state S as [d (keys), d (values)]:
//   S <- exp(g) S;  S += beta k (v - S k);  out = S q
struct DeltaScan {
    int64_t d, n;
    const float * q; // [d], n rows, qk_row apart; NULL: compute the state only
    const float * k; // [d], n rows, qk_row apart
    const float * v; // [d], n rows, v_row apart
    int64_t qk_row, v_row;
    const float * decay; // exp(g) of row i at i * gate_row
    const float * beta;
    int64_t gate_row;
    const float * qk;        // [n]: dot products of q and k
    const int32_t * parents; // [n]: earlier row or -1; NULL: rows are a chain
    const float * state;     // [d, d]
    float * last_state;      // [d, d], may be `state`: state after the last row; NULL: not wanted
    float * out;             // [d], n rows, out_row apart
    int64_t out_row;
};

// Output gate of one row of d values: out <- norm(out) * weight * silu(gate).
struct DeltaGate {
    int64_t d;
    const float * weight;
    const float * gate;
    float eps;
    float * out;
};

constexpr int64_t DELTA_GATES = 16;

// Gates of DELTA_GATES rows: decay = exp(a softplus(x + bias)), beta = sigmoid(y).
struct DeltaGates {
    float a, bias;
    const float *x, *y;
    float *decay, *beta;
};

struct DeltaHeadKernel {
    void (*convolve)(const DeltaConvolution & work);
    // Scales a row of d values: to <- x * length / sqrt(sum(x^2) + eps).
    void (*scale)(const float * x, int64_t d, float length, float eps, float * to);
    float (*dot)(const float * a, const float * g, int64_t d);
    // Returns the scratch size in floats of scan() along parents.
    int64_t (*scratch_size)(int64_t d, int64_t n);
    void (*scan)(const DeltaScan & work, float * scratch);
    void (*gate)(const DeltaGate & work);
    void (*gates)(const DeltaGates & work);
};

constexpr int64_t MAX_DELTA_TAPS = 16, MAX_DELTA_HEAD = 1024;

// Returns the best Gated DeltaNet kernel for this CPU.
const DeltaHeadKernel * delta_head();

} // namespace dfl::cpu
