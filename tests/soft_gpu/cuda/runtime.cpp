// libcudart.so: properties of the device, memory, copies, streams and events.
#include "../block.h"
#include "../launch.h"
#include "../memory_check.h"
#include "api.h"
#include "device_memory.h"
#include "streams.h"

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

using namespace soft_gpu;

namespace {

// The capability that the device reports; its PTX stays that of the module.
int capability() {
    const char * set = std::getenv("SOFT_GPU_CAPABILITY");
    return set != nullptr ? std::atoi(set) : 86;
}

constexpr int DEFAULT_SHARED_BYTES = 48 << 10;

std::mutex mutex;
std::map<const void *, size_t> pinned;

void pin(const void * at, size_t bytes) {
    allow_memory(at, bytes);
    const std::lock_guard<std::mutex> lock(mutex);
    pinned[at] = bytes;
    counts().pinned_bytes += bytes;
}

void unpin(const void * at) {
    synchronize_all();
    forbid_memory(at);
    const std::lock_guard<std::mutex> lock(mutex);
    counts().pinned_bytes -= pinned[at];
    pinned.erase(at);
}

bool is_pinned(const void * at) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto next = pinned.upper_bound(at);
    if (next == pinned.begin()) {
        return false;
    }
    const auto & [start, bytes] = *std::prev(next);
    return static_cast<const char *>(at) < static_cast<const char *>(start) + bytes;
}

struct Rows {
    char * to;
    size_t to_pitch;
    const char * from;
    size_t from_pitch, width, height;

    void copy() const {
        for (size_t row = 0; row < height; ++row) {
            std::memmove(to + row * to_pitch, from + row * from_pitch, width);
        }
    }
};

// Pageable host memory is read when the copy is asked for and written before the call returns;
// pinned memory when the stream gets there. A graph keeps the address of either.
cudaError_t copy(const Rows & rows, cudaMemcpyKind kind, cudaStream_t stream) {
    const auto bytes = static_cast<int64_t>(rows.width * rows.height);
    Counts & all = counts();
    if (kind == cudaMemcpyDeviceToHost) {
        ++all.copies_to_host;
        all.bytes_to_host += bytes;
    } else if (kind == cudaMemcpyHostToDevice) {
        ++all.copies_to_gpu;
        all.bytes_to_gpu += bytes;
    }
    const std::string name = "copy of kind " + std::to_string(kind);
    const bool waits = !is_capturing(stream);
    if (waits && kind == cudaMemcpyHostToDevice && !is_pinned(rows.from)) {
        auto kept = std::make_shared<std::string>(rows.width * rows.height, '\0');
        Rows{kept->data(), rows.width, rows.from, rows.from_pitch, rows.width, rows.height}.copy();
        enqueue(stream, {name, [=] {
                             Rows{rows.to,    rows.to_pitch, kept->data(),
                                  rows.width, rows.width,    rows.height}
                                 .copy();
                         }});
        return cudaSuccess;
    }
    enqueue(stream, {name, [=] { rows.copy(); }});
    if (waits && kind == cudaMemcpyDeviceToHost && !is_pinned(rows.to)) {
        synchronize(stream);
    }
    return cudaSuccess;
}

Rows one_row(void * to, const void * from, size_t bytes) {
    return {static_cast<char *>(to), bytes, static_cast<const char *>(from), bytes, bytes, 1};
}

cudaError_t set(void * to, int value, size_t bytes, cudaStream_t stream) {
    enqueue(stream, {"set", [=] { std::memset(to, value, bytes); }});
    return cudaSuccess;
}

template <class Handle>
cudaError_t make(Handle * handle) {
    static std::atomic<uintptr_t> next{4096};
    *handle = reinterpret_cast<Handle>(next += 16);
    return cudaSuccess;
}

} // namespace

EXPORT cudaError_t cudaGetDeviceCount(int * n) {
    *n = 1;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetDevice(int * device) {
    *device = 0;
    return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int) { return cudaSuccess; }

EXPORT cudaError_t cudaSetDeviceFlags(unsigned) { return cudaSuccess; }

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp * device, int) {
    *device = {};
    std::snprintf(device->name, sizeof(device->name), "software GPU");
    device->totalGlobalMem = TOTAL_BYTES;
    device->major = capability() / 10;
    device->minor = capability() % 10;
    device->multiProcessorCount = static_cast<int>(settings().n_multiprocessors);
    device->warpSize = N_LANES;
    device->sharedMemPerBlock = DEFAULT_SHARED_BYTES;
    device->sharedMemPerBlockOptin = MAX_SHARED_BYTES;
    device->sharedMemPerMultiprocessor = MAX_SHARED_BYTES + (1 << 10);
    device->maxThreadsPerBlock = MAX_BLOCK_THREADS;
    device->maxThreadsPerMultiProcessor = 1536;
    device->regsPerBlock = device->regsPerMultiprocessor = 65536;
    for (int i = 0; i < 3; ++i) {
        device->maxGridSize[i] = i == 0 ? INT32_MAX : 65535;
        device->maxThreadsDim[i] = i == 2 ? 64 : MAX_BLOCK_THREADS;
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int * value, cudaDeviceAttr attribute, int) {
    static const std::map<int, int> KNOWN = {
        {cudaDevAttrComputeCapabilityMajor, capability() / 10},
        {cudaDevAttrComputeCapabilityMinor, capability() % 10},
        {cudaDevAttrMultiProcessorCount, static_cast<int>(settings().n_multiprocessors)},
        {cudaDevAttrWarpSize, N_LANES},
        {cudaDevAttrMaxThreadsPerBlock, MAX_BLOCK_THREADS},
        {cudaDevAttrMaxGridDimX, INT32_MAX},
        {cudaDevAttrMaxGridDimY, 65535},
        {cudaDevAttrMaxSharedMemoryPerBlock, DEFAULT_SHARED_BYTES},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, MAX_SHARED_BYTES},
        {cudaDevAttrCooperativeLaunch, 1},
        {cudaDevAttrIntegrated, 0},
        {cudaDevAttrMemoryPoolsSupported, 0}};
    const auto found = KNOWN.find(attribute);
    if (found == KNOWN.end()) {
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
    return error == cudaErrorMemoryAllocation ? "out of memory" : "an error of the software GPU";
}

EXPORT cudaError_t cudaGetLastError() { return cudaSuccess; }

EXPORT cudaError_t cudaPeekAtLastError() { return cudaSuccess; }

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

EXPORT cudaError_t cudaMemcpyAsync(void * to, const void * from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream) {
    return copy(one_row(to, from, bytes), kind, stream);
}

EXPORT cudaError_t cudaMemcpy2DAsync(void * to, size_t to_pitch, const void * from,
                                     size_t from_pitch, size_t width, size_t height,
                                     cudaMemcpyKind kind, cudaStream_t stream) {
    return copy({static_cast<char *>(to), to_pitch, static_cast<const char *>(from), from_pitch,
                 width, height},
                kind, stream);
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void * to, int, const void * from, int, size_t bytes,
                                       cudaStream_t stream) {
    return copy(one_row(to, from, bytes), cudaMemcpyDeviceToDevice, stream);
}

EXPORT cudaError_t cudaMemset(void * to, int value, size_t bytes) {
    synchronize_all();
    return set(to, value, bytes, nullptr);
}

EXPORT cudaError_t cudaMemsetAsync(void * to, int value, size_t bytes, cudaStream_t stream) {
    return set(to, value, bytes, stream);
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
