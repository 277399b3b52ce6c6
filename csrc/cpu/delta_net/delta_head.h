// Kernels for one head of a Gated DeltaNet layer: convolution, delta rule along the paths of a
// tree, and output gate. A node's result depends on its own path alone and has the same bits beside
// any other nodes, and whether a path is scanned to verify, to append or to promote.
#pragma once

#include <cstdint>

namespace dfl::cpu {

// Depthwise causal convolution with SiLU, of d channels and n rows.
struct DeltaConvolution {
    int64_t d, n, d_conv;
    const float * past; // committed inputs: d_conv - 1 rows of [d], past_row floats apart
    const float * u;    // new inputs: n rows of [d], u_row floats apart
    int64_t past_row, u_row;
    // Inputs under each row's taps, [n, d_conv], as indices in `past` followed by `u`; NULL: a
    // chain.
    const int32_t * taps;
    const float * kernel; // weights of the convolution, [d_conv, d]
    float * out;          // result: n rows of [d], out_row floats apart
    int64_t out_row;
};

// Delta rule over n rows, with the state S as [d (keys), d (values)]:
//   S <- exp(g) S;  S += beta k (v - S k);  out = S q
struct DeltaScan {
    int64_t d, n;
    const float * q; // queries: n rows of [d], qk_row floats apart; NULL: compute only the state
    const float * k; // keys: n rows of [d], qk_row floats apart
    const float * v; // values: n rows of [d], v_row floats apart
    int64_t qk_row, v_row;
    const float * decay; // decay exp(g) of row i, at index i * gate_row
    const float * beta;
    int64_t gate_row;
    const float * qk;        // dot product of each row's q and k, [n]
    const int32_t * parents; // index of each row's parent row, or -1, [n]; NULL: a chain
    const float * state;     // state before the first row, [d, d]
    float * last_state;      // state after the last row, [d, d], may be `state`; NULL: not wanted
    float * out;             // outputs: n rows of [d], out_row floats apart
    int64_t out_row;
};

// Arguments of the output gate of one row of d values: out <- norm(out) * weight * silu(gate).
struct DeltaGate {
    int64_t d;
    const float * weight;
    const float * gate;
    float eps;
    float * out;
};

constexpr int64_t DELTA_GATES = 16;

// Arguments of the gates of 16 rows: decay = exp(a softplus(x + bias)), beta = sigmoid(y).
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
    // Returns the number of scratch floats for scan() along the parents of n rows of head size d.
    int64_t (*scratch_size)(int64_t d, int64_t n);
    void (*scan)(const DeltaScan & work, float * scratch);
    void (*gate)(const DeltaGate & work);
    void (*gates)(const DeltaGates & work);
};

constexpr int64_t MAX_DELTA_TAPS = 16, MAX_DELTA_HEAD = 1024;

// Returns the best Gated DeltaNet kernel for this CPU.
const DeltaHeadKernel * delta_head();

} // namespace dfl::cpu
