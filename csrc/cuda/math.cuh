// Reads and functions that several kernels use.
#pragma once

#include <cuda_runtime.h>

namespace dfl::cuda {

constexpr int HEAD_SIZE = 128; // head size d that the kernels of Gated DeltaNet support

__device__ __forceinline__ float4 quad(const float * x) {
    return *reinterpret_cast<const float4 *>(x);
}

// Returns exp(x) for x <= 0, with about the error of rounding x to float32.
__device__ __forceinline__ float exponential(float x) { return exp2f(x * 1.44269504f); }

__device__ __forceinline__ float dot(float4 a, float4 b, float sum) {
    sum = fmaf(a.x, b.x, sum);
    sum = fmaf(a.y, b.y, sum);
    sum = fmaf(a.z, b.z, sum);
    return fmaf(a.w, b.w, sum);
}

template <int N>
__device__ __forceinline__ void load(const float * from, float (&to)[N]) {
    if constexpr (N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const float4 x = quad(from + i);
            to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
        }
    } else {
        static_assert(N == 2);
        const float2 x = *reinterpret_cast<const float2 *>(from);
        to[0] = x.x, to[1] = x.y;
    }
}

} // namespace dfl::cuda
