// Counters and types of a GPU in software: the null GPU or that of tests/soft_gpu.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

// Counters of calls and bytes. null_gpu.py lists their names in the same order.
struct Counts {
    std::atomic<int64_t> used_bytes;
    std::atomic<int64_t> peak_bytes;
    std::atomic<int64_t> allocations;
    std::atomic<int64_t> pinned_bytes;
    std::atomic<int64_t> kernels;          // kernels launched outside of graph captures
    std::atomic<int64_t> captured_kernels; // kernels recorded in captured graphs
    std::atomic<int64_t> captures;
    std::atomic<int64_t> graph_launches;
    std::atomic<int64_t> graph_updates;
    std::atomic<int64_t> cublas_calls;
    std::atomic<int64_t> synchronizations;
    std::atomic<int64_t> copies_to_gpu;
    std::atomic<int64_t> bytes_to_gpu;
    std::atomic<int64_t> copies_to_host;
    std::atomic<int64_t> bytes_to_host;
    std::atomic<int64_t> replayed_nodes; // counted by the software GPU alone, as the next one
    std::atomic<int64_t> failed_updates;
};

// Memory of an RTX 3090.
static constexpr int64_t TOTAL_BYTES = int64_t(24) << 30;

EXPORT Counts * null_gpu_counts();
// Takes bytes of the GPU's memory, or frees them if negative. False if memory is exhausted.
EXPORT bool null_gpu_take(int64_t bytes);

static inline Counts & counts() { return *null_gpu_counts(); }

struct Device {
    const char * name;
    int capability, binary_version, n_multiprocessors, max_shared_bytes, threads_a_multiprocessor;
};

struct Configuration {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
};

// Rows of a copy; pitches are the bytes from one row to the next.
struct Rows {
    char * to;
    size_t to_pitch;
    const char * from;
    size_t from_pitch, width, height;
};
