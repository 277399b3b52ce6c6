// A program that nvcc compiles for the software GPU: prints "right" if its kernels compute.
#include <cooperative_groups.h>
#include <cstdio>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <vector>

namespace {

constexpr int N = 4096, N_THREADS = 256;

__constant__ float factors[2] = {2.0f, 0.5f};

// Sums products of halves: asynchronous copies, shared memory, shuffles, an atomic result.
__global__ void dot(const __half * a, const __half * b, float * sum, int n) {
    __shared__ __align__(16) __half tile[2][N_THREADS * 8];
    __shared__ float parts[N_THREADS / 32];
    float mine = 0;
    for (int first = blockIdx.x * N_THREADS * 8; first < n; first += gridDim.x * N_THREADS * 8) {
        const int at = threadIdx.x * 8;
        __pipeline_memcpy_async(&tile[0][at], a + first + at, 16);
        __pipeline_memcpy_async(&tile[1][at], b + first + at, 16);
        __pipeline_commit();
        __pipeline_wait_prior(0);
        __syncthreads();
        for (int i = threadIdx.x; i < N_THREADS * 8; i += N_THREADS) {
            mine += __half2float(tile[0][i]) * __half2float(tile[1][i]);
        }
        __syncthreads();
    }
    for (int distance = 16; distance > 0; distance /= 2) {
        mine += __shfl_xor_sync(0xffffffff, mine, distance);
    }
    if (threadIdx.x % 32 == 0) {
        parts[threadIdx.x / 32] = mine;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        float all = 0;
        for (float part : parts) {
            all += part;
        }
        atomicAdd(sum, all * factors[0] * factors[1]);
    }
}

// Writes each element where another block reads it after a barrier of the grid.
__global__ void mirror(int * values, int * mirrored) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
    values[at] = at;
    cooperative_groups::this_grid().sync();
    mirrored[at] = values[n - 1 - at];
}

template <class T>
T * on_gpu(const std::vector<T> & values) {
    T * memory = nullptr;
    cudaMalloc(&memory, values.size() * sizeof(T));
    cudaMemcpyAsync(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice,
                    cudaStreamPerThread);
    return memory;
}

template <class T>
std::vector<T> to_host(const T * memory, size_t n) {
    std::vector<T> values(n);
    cudaMemcpyAsync(values.data(), memory, n * sizeof(T), cudaMemcpyDeviceToHost,
                    cudaStreamPerThread);
    cudaStreamSynchronize(cudaStreamPerThread);
    return values;
}

} // namespace

int main() {
    std::vector<__half> a, b;
    float expected = 0;
    for (int i = 0; i < N; ++i) {
        a.push_back(__float2half(static_cast<float>(i % 7)));
        b.push_back(__float2half(static_cast<float>(i % 5)));
        expected += static_cast<float>(i % 7) * static_cast<float>(i % 5);
    }
    float * sum = on_gpu(std::vector<float>{0.0f});
    dot<<<2, N_THREADS, 0, cudaStreamPerThread>>>(on_gpu(a), on_gpu(b), sum, N);
    const float found = to_host(sum, 1)[0];

    int *values = on_gpu(std::vector<int>(128)), *mirrored = on_gpu(std::vector<int>(128));
    void * arguments[] = {&values, &mirrored};
    cudaLaunchCooperativeKernel(reinterpret_cast<const void *>(mirror), dim3(4), dim3(32),
                                arguments, 0, cudaStreamPerThread);
    const std::vector<int> turned = to_host(mirrored, 128);
    bool is_turned = true;
    for (int i = 0; i < 128; ++i) {
        is_turned = is_turned && turned[i] == 127 - i;
    }
    std::printf(found == expected && is_turned ? "right\n" : "wrong: %f %f %d\n", found, expected,
                is_turned);
    return 0;
}
