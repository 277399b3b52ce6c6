// Calls of CUDA's runtime that the null GPU and the software GPU of tests/soft_gpu share. A file
// includes this header behind its own device(), launch(), allocate(), release(), pin(), unpin(),
// copy(), set(), synchronize(), synchronize_all(), record(), wait_for_event(), synchronize_event()
// and fail().
#pragma once

#include "cuda_common.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

EXPORT void __cudaRegisterFatBinaryEnd(void **) {}
EXPORT char __cudaInitModule(void **) { return 1; }
EXPORT void __cudaUnregisterFatBinary(void **) {}
EXPORT void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}

static thread_local Configuration pushed_;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                            cudaStream_t stream) {
    pushed_ = {grid, block, shared, stream};
    return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3 * grid, dim3 * block, size_t * shared,
                                              void * stream) {
    *grid = pushed_.grid;
    *block = pushed_.block;
    *shared = pushed_.shared;
    *static_cast<cudaStream_t *>(stream) = pushed_.stream;
    return cudaSuccess;
}

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t * kernel, const void * host_function) {
    *kernel = static_cast<cudaKernel_t>(const_cast<void *>(host_function));
    return cudaSuccess;
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void ** arguments,
                                      size_t shared, cudaStream_t stream) {
    return launch(kernel, {grid, block, shared, stream}, arguments, false);
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(const void * kernel, dim3 grid, dim3 block,
                                               void ** arguments, size_t shared,
                                               cudaStream_t stream) {
    return launch(kernel, {grid, block, shared, stream}, arguments, true);
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t * config, const void * kernel,
                                       void ** arguments) {
    bool is_cooperative = false;
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        is_cooperative |= config->attrs[i].id == cudaLaunchAttributeCooperative &&
                          config->attrs[i].val.cooperative != 0;
    }
    return launch(kernel,
                  {config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream},
                  arguments, is_cooperative);
}

EXPORT cudaError_t cudaGetDeviceCount(int * n) {
    *n = 1;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetDevice(int * ordinal) {
    *ordinal = 0;
    return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int) { return cudaSuccess; }

EXPORT cudaError_t cudaSetDeviceFlags(unsigned) { return cudaSuccess; }

static constexpr int DEFAULT_SHARED_BYTES = 48 << 10, MAX_THREADS = 1024, N_WARP = 32;

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp * properties, int) {
    const Device of = device();
    *properties = {};
    std::snprintf(properties->name, sizeof(properties->name), "%s", of.name);
    properties->totalGlobalMem = TOTAL_BYTES;
    properties->major = of.capability / 10;
    properties->minor = of.capability % 10;
    properties->multiProcessorCount = of.n_multiprocessors;
    properties->warpSize = N_WARP;
    properties->sharedMemPerBlock = DEFAULT_SHARED_BYTES;
    properties->sharedMemPerBlockOptin = of.max_shared_bytes;
    properties->sharedMemPerMultiprocessor = of.max_shared_bytes + (1 << 10);
    properties->maxThreadsPerBlock = MAX_THREADS;
    properties->maxThreadsPerMultiProcessor = of.threads_a_multiprocessor;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    for (int i = 0; i < 3; ++i) {
        properties->maxGridSize[i] = i == 0 ? INT32_MAX : 65535;
        properties->maxThreadsDim[i] = i == 2 ? 64 : MAX_THREADS;
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int * value, cudaDeviceAttr attribute, int) {
    const Device of = device();
    const std::map<int, int> known = {
        {cudaDevAttrComputeCapabilityMajor, of.capability / 10},
        {cudaDevAttrComputeCapabilityMinor, of.capability % 10},
        {cudaDevAttrMultiProcessorCount, of.n_multiprocessors},
        {cudaDevAttrWarpSize, N_WARP},
        {cudaDevAttrMaxThreadsPerBlock, MAX_THREADS},
        {cudaDevAttrMaxGridDimX, INT32_MAX},
        {cudaDevAttrMaxGridDimY, 65535},
        {cudaDevAttrMaxSharedMemoryPerBlock, DEFAULT_SHARED_BYTES},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, of.max_shared_bytes},
        {cudaDevAttrCooperativeLaunch, 1},
        {cudaDevAttrIntegrated, 0},
        {cudaDevAttrMemoryPoolsSupported, 0}};
    const auto found = known.find(attribute);
    if (found == known.end()) {
        fail("the device is asked for attribute " + std::to_string(attribute));
    }
    *value = found->second;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char * text, int size, int) {
    std::snprintf(text, size, "0000:00:00.0");
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int * can, int, int) {
    *can = 0;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

EXPORT cudaError_t cudaDeviceSynchronize() {
    ++counts().synchronizations;
    synchronize_all();
    return cudaSuccess;
}

EXPORT const char * cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : "an error of a GPU in software";
}

EXPORT cudaError_t cudaGetLastError() { return cudaSuccess; }

EXPORT cudaError_t cudaPeekAtLastError() { return cudaSuccess; }

EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes * attributes, const void *) {
    *attributes = {};
    attributes->maxThreadsPerBlock = MAX_THREADS;
    attributes->numRegs = 64;
    attributes->ptxVersion = attributes->binaryVersion = device().binary_version;
    return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int * n, const void *,
                                                                          int, size_t, unsigned) {
    *n = 2;
    return cudaSuccess;
}

EXPORT cudaError_t cudaMalloc(void ** at, size_t bytes) {
    *at = allocate(bytes);
    return *at == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}

EXPORT cudaError_t cudaMallocManaged(void ** at, size_t bytes, unsigned) {
    return cudaMalloc(at, bytes);
}

EXPORT cudaError_t cudaFree(void * at) {
    if (at != nullptr) {
        synchronize_all();
        release(at);
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostAlloc(void ** at, size_t bytes, unsigned) {
    *at = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (*at == nullptr) {
        return cudaErrorMemoryAllocation;
    }
    std::memset(*at, 0xff, bytes);
    pin(*at, bytes);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMallocHost(void ** at, size_t bytes) { return cudaHostAlloc(at, bytes, 0); }

EXPORT cudaError_t cudaFreeHost(void * at) {
    if (at != nullptr) {
        unpin(at);
        std::free(at);
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostGetDevicePointer(void ** at, void * host, unsigned) {
    *at = host;
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostRegister(void * at, size_t bytes, unsigned) {
    pin(at, bytes);
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void * at) {
    unpin(at);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemGetInfo(size_t * free, size_t * total) {
    *total = TOTAL_BYTES;
    *free = *total - counts().used_bytes;
    return cudaSuccess;
}

static cudaError_t count_and_copy(const Rows & rows, cudaMemcpyKind kind, cudaStream_t stream) {
    const auto bytes = static_cast<int64_t>(rows.width * rows.height);
    if (kind == cudaMemcpyDeviceToHost) {
        ++counts().copies_to_host;
        counts().bytes_to_host += bytes;
    } else if (kind == cudaMemcpyHostToDevice) {
        ++counts().copies_to_gpu;
        counts().bytes_to_gpu += bytes;
    }
    return copy(rows, kind, stream);
}

static Rows one_row(void * to, const void * from, size_t bytes) {
    return {static_cast<char *>(to), bytes, static_cast<const char *>(from), bytes, bytes, 1};
}

EXPORT cudaError_t cudaMemcpyAsync(void * to, const void * from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream) {
    return count_and_copy(one_row(to, from, bytes), kind, stream);
}

EXPORT cudaError_t cudaMemcpy2DAsync(void * to, size_t to_pitch, const void * from,
                                     size_t from_pitch, size_t width, size_t height,
                                     cudaMemcpyKind kind, cudaStream_t stream) {
    return count_and_copy({static_cast<char *>(to), to_pitch, static_cast<const char *>(from),
                           from_pitch, width, height},
                          kind, stream);
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void * to, int, const void * from, int, size_t bytes,
                                       cudaStream_t stream) {
    return count_and_copy(one_row(to, from, bytes), cudaMemcpyDeviceToDevice, stream);
}

EXPORT cudaError_t cudaMemset(void * to, int value, size_t bytes) {
    synchronize_all();
    return set(to, value, bytes, nullptr);
}

EXPORT cudaError_t cudaMemsetAsync(void * to, int value, size_t bytes, cudaStream_t stream) {
    return set(to, value, bytes, stream);
}

// Makes a unique handle of a stream or an event, which is never dereferenced.
template <typename Handle>
static cudaError_t make(Handle * handle) {
    static std::atomic<uintptr_t> next{4096};
    *handle = reinterpret_cast<Handle>(next += 16);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t * stream, unsigned) {
    return make(stream);
}

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    synchronize(stream);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    ++counts().synchronizations;
    synchronize(stream);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    wait_for_event(stream, event);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t * event, unsigned) { return make(event); }

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    record(event, stream);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    ++counts().synchronizations;
    synchronize_event(event);
    return cudaSuccess;
}
