// Arrays on a GPU, and shapes of trees, for the tests of kernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <random>
#include <vector>

namespace kernel_test {

inline void check(cudaError_t status, const char * what) {
    if (status != cudaSuccess) {
        std::printf("%s: %s\n", what, cudaGetErrorString(status));
        std::exit(1);
    }
}

// An array on the host and on the GPU.
template <class T>
struct Array {
    std::vector<T> host;
    T * gpu = nullptr;

    explicit Array(size_t n, T value = {}) : host(n, value) {}
    Array(const Array &) = delete;
    ~Array() { cudaFree(gpu); }
    T * to_gpu() {
        if (gpu == nullptr) {
            check(cudaMalloc(&gpu, std::max<size_t>(1, host.size()) * sizeof(T)), "cudaMalloc");
        }
        check(cudaMemcpyAsync(gpu, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice,
                              cudaStreamPerThread),
              "to the GPU");
        check(cudaStreamSynchronize(cudaStreamPerThread), "to the GPU");
        return gpu;
    }
    void to_host() {
        check(cudaMemcpyAsync(host.data(), gpu, host.size() * sizeof(T), cudaMemcpyDeviceToHost,
                              cudaStreamPerThread),
              "to the host");
        check(cudaStreamSynchronize(cudaStreamPerThread), "to the host");
    }
};

enum Shape { CHAIN, TREE, COMB, STAR };
const char * const SHAPES[] = {"chain", "tree", "comb", "star"};

inline std::vector<int32_t> parents_of(Shape shape, int n, std::mt19937 & random) {
    std::vector<int32_t> parents(n, -1);
    for (int i = 1; i < n; ++i) {
        parents[i] = shape == CHAIN  ? i - 1
                     : shape == STAR ? 0
                     : shape == COMB ? (i % 2 == 1 ? std::max(0, i - 2) : i - 1)
                                     : std::max<int>(0, i - 1 - random() % std::min(i, 24));
    }
    return parents;
}

} // namespace kernel_test
