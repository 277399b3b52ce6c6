// The null GPU: a CUDA driver, runtime and cuBLAS with memory, streams and graphs, but no
// arithmetic.
//
// null_gpu.py compiles this source to three libraries; runtime and cuBLAS link the driver, which
// has the counters. In copies to the host, 32-bit word i is 1 + i % 1024: valid and different token
// ids, and no probability of 0, whose logarithm would make a request drop its drafter. GPU memory
// is mapped without access rights, so that a host access ends the process.

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cxxabi.h>
#include <map>
#include <mutex>
#include <string>
#include <sys/mman.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

// Counters of calls and bytes. null_gpu.py lists their names in the same order.
struct NullGpuCounts {
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
};

// Number of runs of each kernel, cuBLAS function, and copy or fill on the GPU, by name.
using Launches = std::map<std::string, int64_t>;
// Launches of a captured graph; pointers into the Launches of the driver.
using Graph = std::map<int64_t *, int64_t>;

EXPORT NullGpuCounts * null_gpu_counts();
EXPORT int64_t null_gpu_total_bytes();
EXPORT bool null_gpu_take(int64_t bytes);
// Returns the place in which the launches of a name are counted.
EXPORT int64_t * null_gpu_launches(const char * name);
// Returns the graph that is being captured, or NULL.
EXPORT Graph *& null_gpu_captured();

// Counts a launch, at once or in the graph that is being captured.
static void launch(int64_t * launches) {
    Graph * captured = null_gpu_captured();
    ++(captured != nullptr ? (*captured)[launches] : *launches);
}

#ifdef NULL_GPU_DRIVER

static Launches launches_;

EXPORT int64_t * null_gpu_launches(const char * name) { return &launches_[name]; }

EXPORT Graph *& null_gpu_captured() {
    static Graph * captured = nullptr;
    return captured;
}

// Writes a line "launches name" for each name that was launched. Returns the length of the text.
EXPORT size_t null_gpu_write_launches(char * text, size_t size) {
    std::string all;
    for (const auto & [name, n] : launches_) {
        if (n > 0) {
            int status = 0;
            char * plain = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
            all += std::to_string(n) + " " + (status == 0 ? plain : name) + "\n";
            std::free(plain);
        }
    }
    std::snprintf(text, size, "%s", all.c_str());
    return all.size();
}

EXPORT NullGpuCounts * null_gpu_counts() {
    static NullGpuCounts counts = {};
    return &counts;
}

EXPORT int64_t null_gpu_total_bytes() { return int64_t(24) << 30; }

// Allocates bytes of GPU memory, or frees them if negative. Returns false if memory is exhausted.
EXPORT bool null_gpu_take(int64_t bytes) {
    NullGpuCounts & counts = *null_gpu_counts();
    const int64_t used = counts.used_bytes += bytes;
    if (used > null_gpu_total_bytes()) {
        counts.used_bytes -= bytes;
        return false;
    }
    counts.allocations += bytes > 0;
    for (int64_t peak = counts.peak_bytes;
         used > peak && !counts.peak_bytes.compare_exchange_weak(peak, used);) {
    }
    return true;
}

EXPORT CUresult cuDeviceGet(CUdevice * device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int * value, CUdevice_attribute, CUdevice) {
    *value = 1; // the only attribute that ggml reads: support of virtual memory
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult, const char ** text) {
    *text = "the null GPU";
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t * bytes, const CUmemAllocationProp *,
                                              CUmemAllocationGranularity_flags) {
    *bytes = 2 << 20;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr * at, size_t bytes, size_t, CUdeviceptr,
                                    unsigned long long) {
    void * found =
        mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *at = reinterpret_cast<CUdeviceptr>(found);
    return found == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes) {
    munmap(reinterpret_cast<void *>(at), bytes);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle * handle, size_t bytes,
                            const CUmemAllocationProp *, unsigned long long) {
    *handle = bytes;
    return null_gpu_take(static_cast<int64_t>(bytes)) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr, size_t bytes) {
    null_gpu_take(-static_cast<int64_t>(bytes));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle,
                         unsigned long long) {
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle) {
    return CUDA_SUCCESS; // frees nothing, as cuMemUnmap has freed the memory
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t) {
    return CUDA_SUCCESS;
}

#endif

#ifdef NULL_GPU_RUNTIME

static std::mutex mutex_;
static std::map<uintptr_t, size_t> memory_;
static std::map<const void *, size_t> pinned_;
static std::map<const void *, int64_t *> kernels_; // launches of each kernel by its host function
static thread_local struct {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
} call_;

static cudaError_t launched(const void * kernel) {
    NullGpuCounts & counts = *null_gpu_counts();
    ++(null_gpu_captured() != nullptr ? counts.captured_kernels : counts.kernels);
    const auto known = kernels_.find(kernel);
    launch(known != kernels_.end() ? known->second : null_gpu_launches("unregistered kernel"));
    return cudaSuccess;
}

// Makes a unique handle (stream, event), which is never dereferenced.
template <typename T>
static cudaError_t make(T * handle) {
    static std::atomic<uintptr_t> next{4096};
    *handle = reinterpret_cast<T>(next += 16);
    return cudaSuccess;
}

static void * reserve(size_t bytes) {
    void * found =
        mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return found == MAP_FAILED ? nullptr : found;
}

// Maximum bytes written in each row of a 2-D copy to the host, as writing takes host time.
static constexpr size_t MOST_WRITTEN = 64 << 10, N_DIFFERENT = 1024;

static cudaError_t copied(void * to, size_t pitch, size_t width, size_t height,
                          cudaMemcpyKind kind) {
    NullGpuCounts & counts = *null_gpu_counts();
    if (kind == cudaMemcpyDeviceToHost) {
        for (size_t row = 0; row < height; ++row) {
            auto * words = reinterpret_cast<uint32_t *>(static_cast<char *>(to) + row * pitch);
            for (size_t i = 0; i < std::min(width, MOST_WRITTEN) / 4; ++i) {
                words[i] = static_cast<uint32_t>(1 + i % N_DIFFERENT);
            }
        }
        ++counts.copies_to_host;
        counts.bytes_to_host += width * height;
    } else if (kind == cudaMemcpyHostToDevice) {
        ++counts.copies_to_gpu;
        counts.bytes_to_gpu += width * height;
    } else {
        launch(null_gpu_launches("copy on the GPU"));
    }
    return cudaSuccess;
}

EXPORT void ** __cudaRegisterFatBinary(void *) {
    static void * handle = nullptr;
    return &handle;
}

EXPORT void __cudaRegisterFatBinaryEnd(void **) {}
EXPORT void __cudaUnregisterFatBinary(void **) {}
EXPORT void __cudaRegisterFunction(void **, const char * host_function, char *, const char * name,
                                   int, uint3 *, uint3 *, dim3 *, dim3 *, int *) {
    kernels_[host_function] = null_gpu_launches(name);
}
EXPORT void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                            cudaStream_t stream) {
    call_ = {grid, block, shared, stream};
    return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3 * grid, dim3 * block, size_t * shared,
                                              void * stream) {
    *grid = call_.grid;
    *block = call_.block;
    *shared = call_.shared;
    *static_cast<cudaStream_t *>(stream) = call_.stream;
    return cudaSuccess;
}

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t * kernel, const void * entry) {
    *kernel = static_cast<cudaKernel_t>(const_cast<void *>(entry));
    return cudaSuccess;
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void **, size_t,
                                      cudaStream_t) {
    return launched(kernel);
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(const void * kernel, dim3, dim3, void **, size_t,
                                               cudaStream_t) {
    return launched(kernel);
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void * kernel, void **) {
    return launched(kernel);
}

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

static constexpr int MULTIPROCESSORS = 82; // number of multiprocessors of an RTX 3090
static constexpr bool IS_HOPPER = NULL_GPU_CAPABILITY == 90;
static constexpr int SHARED_PER_BLOCK = (IS_HOPPER ? 227 : 99) << 10;

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp * found, int) {
    *found = {};
    std::snprintf(found->name, sizeof(found->name), "null GPU");
    found->totalGlobalMem = null_gpu_total_bytes();
    found->major = NULL_GPU_CAPABILITY / 10;
    found->minor = NULL_GPU_CAPABILITY % 10;
    found->multiProcessorCount = MULTIPROCESSORS;
    found->warpSize = 32;
    found->sharedMemPerBlock = 48 << 10;
    found->sharedMemPerBlockOptin = SHARED_PER_BLOCK;
    found->sharedMemPerMultiprocessor = SHARED_PER_BLOCK + (1 << 10);
    found->maxThreadsPerBlock = 1024;
    found->maxThreadsPerMultiProcessor = IS_HOPPER ? 2048 : 1536;
    found->regsPerBlock = 65536;
    found->regsPerMultiprocessor = 65536;
    for (int i = 0; i < 3; ++i) {
        found->maxGridSize[i] = i == 0 ? INT32_MAX : 65535;
        found->maxThreadsDim[i] = i == 2 ? 64 : 1024;
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int * value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
        *value = NULL_GPU_CAPABILITY / 10;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *value = NULL_GPU_CAPABILITY % 10;
        break;
    case cudaDevAttrMultiProcessorCount:
        *value = MULTIPROCESSORS;
        break;
    case cudaDevAttrWarpSize:
        *value = 32;
        break;
    case cudaDevAttrMaxThreadsPerBlock:
        *value = 1024;
        break;
    case cudaDevAttrMaxGridDimX:
        *value = INT32_MAX;
        break;
    case cudaDevAttrMaxGridDimY:
        *value = 65535;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        *value = 48 << 10;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = SHARED_PER_BLOCK;
        break;
    case cudaDevAttrCooperativeLaunch:
        *value = 1;
        break;
    default:
        *value = 0;
        break;
    }
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
    ++null_gpu_counts()->synchronizations;
    return cudaSuccess;
}

EXPORT const char * cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : "the null GPU";
}

EXPORT cudaError_t cudaGetLastError() { return cudaSuccess; }

EXPORT cudaError_t cudaPeekAtLastError() { return cudaSuccess; }

EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes * found, const void *) {
    *found = {};
    found->maxThreadsPerBlock = 1024;
    found->numRegs = 64;
    found->ptxVersion = found->binaryVersion = NULL_GPU_CAPABILITY;
    return cudaSuccess;
}

EXPORT cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) {
    return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int * n, const void *,
                                                                          int, size_t, unsigned) {
    *n = 2;
    return cudaSuccess;
}

EXPORT cudaError_t cudaMalloc(void ** at, size_t bytes) {
    *at = nullptr;
    if (!null_gpu_take(static_cast<int64_t>(bytes))) {
        return cudaErrorMemoryAllocation;
    }
    *at = reserve(bytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    memory_[reinterpret_cast<uintptr_t>(*at)] = bytes;
    return cudaSuccess;
}

EXPORT cudaError_t cudaMallocManaged(void ** at, size_t bytes, unsigned) {
    return cudaMalloc(at, bytes);
}

EXPORT cudaError_t cudaFree(void * at) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = memory_.find(reinterpret_cast<uintptr_t>(at));
    if (found != memory_.end()) {
        null_gpu_take(-static_cast<int64_t>(found->second));
        munmap(at, found->second);
        memory_.erase(found);
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostAlloc(void ** at, size_t bytes, unsigned) {
    *at = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    const std::lock_guard<std::mutex> lock(mutex_);
    pinned_[*at] = bytes;
    null_gpu_counts()->pinned_bytes += bytes;
    return *at != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}

EXPORT cudaError_t cudaMallocHost(void ** at, size_t bytes) { return cudaHostAlloc(at, bytes, 0); }

EXPORT cudaError_t cudaFreeHost(void * at) {
    const std::lock_guard<std::mutex> lock(mutex_);
    null_gpu_counts()->pinned_bytes -= pinned_[at];
    pinned_.erase(at);
    std::free(at);
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostGetDevicePointer(void ** at, void * host, unsigned) {
    *at = host;
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostRegister(void *, size_t, unsigned) { return cudaSuccess; }

EXPORT cudaError_t cudaHostUnregister(void *) { return cudaSuccess; }

EXPORT cudaError_t cudaMemGetInfo(size_t * free, size_t * total) {
    *total = null_gpu_total_bytes();
    *free = *total - null_gpu_counts()->used_bytes;
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyAsync(void * to, const void *, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t) {
    return copied(to, bytes, bytes, 1, kind);
}

EXPORT cudaError_t cudaMemcpy2DAsync(void * to, size_t pitch, const void *, size_t, size_t width,
                                     size_t height, cudaMemcpyKind kind, cudaStream_t) {
    return copied(to, pitch, width, height, kind);
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void *, int, const void *, int, size_t, cudaStream_t) {
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemset(void *, int, size_t) { return cudaSuccess; }

EXPORT cudaError_t cudaMemsetAsync(void *, int, size_t, cudaStream_t) {
    launch(null_gpu_launches("fill on the GPU"));
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t * stream, unsigned) {
    return make(stream);
}

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t) {
    ++null_gpu_counts()->synchronizations;
    return null_gpu_captured() ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t * event, unsigned) { return make(event); }

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }

EXPORT cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t) {
    ++null_gpu_counts()->synchronizations;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
    null_gpu_captured() = new Graph;
    ++null_gpu_counts()->captures;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t * graph) {
    *graph = reinterpret_cast<cudaGraph_t>(null_gpu_captured());
    null_gpu_captured() = nullptr;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus * status) {
    *status = null_gpu_captured() ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t * exec, cudaGraph_t graph,
                                        unsigned long long) {
    *exec = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph *>(graph)));
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphExecUpdate(cudaGraphExec_t exec, cudaGraph_t graph,
                                       cudaGraphExecUpdateResultInfo * info) {
    *info = {};
    *reinterpret_cast<Graph *>(exec) = *reinterpret_cast<Graph *>(graph);
    ++null_gpu_counts()->graph_updates;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t) {
    ++null_gpu_counts()->graph_launches;
    for (const auto & [launches, n] : *reinterpret_cast<Graph *>(exec)) {
        *launches += n;
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete reinterpret_cast<Graph *>(graph);
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    delete reinterpret_cast<Graph *>(exec);
    return cudaSuccess;
}

#endif

#ifdef NULL_GPU_CUBLAS

// Defines a cuBLAS function without its arguments, so that cuBLAS's header is not needed.
#define NULL_CUBLAS(name)                                                                          \
    EXPORT int name() {                                                                            \
        ++null_gpu_counts()->cublas_calls;                                                         \
        launch(null_gpu_launches(#name));                                                          \
        return 0;                                                                                  \
    }

NULL_CUBLAS(cublasGemmBatchedEx)
NULL_CUBLAS(cublasGemmEx)
NULL_CUBLAS(cublasGemmStridedBatchedEx)
NULL_CUBLAS(cublasSgemmBatched)
NULL_CUBLAS(cublasSgemmStridedBatched)
NULL_CUBLAS(cublasSgemm_v2)
NULL_CUBLAS(cublasStrsmBatched)

EXPORT int cublasCreate_v2(void ** handle) {
    static int any;
    *handle = &any;
    return 0;
}

EXPORT int cublasDestroy_v2(void *) { return 0; }

EXPORT int cublasSetMathMode(void *, int) { return 0; }

EXPORT int cublasSetStream_v2(void *, void *) { return 0; }

EXPORT int cublasSetWorkspace_v2(void *, void *, size_t) { return 0; }

EXPORT const char * cublasGetStatusString(int) { return "the null GPU"; }

#endif
