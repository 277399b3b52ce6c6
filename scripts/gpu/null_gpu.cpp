// The null GPU: a CUDA driver, runtime and cuBLAS with memory, streams and graphs, but no
// arithmetic.
//
// null_gpu.py compiles this source to three libraries; runtime and cuBLAS link the driver, which
// has the counters. In copies to the host, 32-bit word i is 1 + i % 1024: valid and different token
// ids, and no probability of 0, whose logarithm would make a request drop its drafter. GPU memory
// is mapped without access rights, so that a host access ends the process.

#include "cuda_common.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cxxabi.h>
#include <map>
#include <mutex>
#include <string>
#include <sys/mman.h>

// Number of runs of each kernel, cuBLAS function, and copy or fill on the GPU, by name.
using Launches = std::map<std::string, int64_t>;
// Launches of a captured graph; pointers into the Launches of the driver.
using Graph = std::map<int64_t *, int64_t>;

// Returns the place in which the launches of a name are counted.
EXPORT int64_t * null_gpu_launches(const char * name);
// Returns the graph that is being captured, or NULL.
EXPORT Graph *& null_gpu_captured();

// Counts a launch, at once or in the graph that is being captured.
static void launch(int64_t * launches) {
    Graph * captured = null_gpu_captured();
    ++(captured != nullptr ? (*captured)[launches] : *launches);
}

#ifndef NULL_GPU_CUBLAS

[[noreturn]] static void fail(const std::string & why) {
    std::fprintf(stderr, "NULL GPU FAILED: %s\n", why.c_str());
    std::abort();
}

static void * reserve(size_t bytes) {
    void * at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? nullptr : at;
}

#endif

#ifdef NULL_GPU_DRIVER

static void map(void *, size_t) {}
static void unmap(void *, size_t) {}

#include "cuda_driver_calls.h"

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

#endif

#ifdef NULL_GPU_RUNTIME

static std::mutex mutex_;
static std::map<const void *, size_t> memory_, pinned_;
static std::map<const void *, int64_t *> kernels_; // launches of each kernel by its host function

static Device device() {
    constexpr bool IS_HOPPER = NULL_GPU_CAPABILITY == 90;
    return {"null GPU",
            NULL_GPU_CAPABILITY,
            NULL_GPU_CAPABILITY,
            82, // multiprocessors of an RTX 3090
            (IS_HOPPER ? 227 : 99) << 10,
            IS_HOPPER ? 2048 : 1536};
}

static cudaError_t launch(const void * kernel, const Configuration &, void **, bool) {
    ++(null_gpu_captured() != nullptr ? counts().captured_kernels : counts().kernels);
    const auto known = kernels_.find(kernel);
    launch(known != kernels_.end() ? known->second : null_gpu_launches("unregistered kernel"));
    return cudaSuccess;
}

static void * allocate(size_t bytes) {
    if (!null_gpu_take(static_cast<int64_t>(bytes))) {
        return nullptr;
    }
    void * at = reserve(bytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    memory_[at] = bytes;
    return at;
}

static void release(void * at) {
    const std::lock_guard<std::mutex> lock(mutex_);
    null_gpu_take(-static_cast<int64_t>(memory_[at]));
    munmap(at, memory_[at]);
    memory_.erase(at);
}

static void pin(const void * at, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    pinned_[at] = bytes;
    counts().pinned_bytes += bytes;
}

static void unpin(const void * at) {
    const std::lock_guard<std::mutex> lock(mutex_);
    counts().pinned_bytes -= pinned_[at];
    pinned_.erase(at);
}

// Maximum bytes written in each row of a copy to the host, as writing takes host time.
static constexpr size_t MOST_WRITTEN = 64 << 10, N_DIFFERENT = 1024;

static cudaError_t copy(const Rows & rows, cudaMemcpyKind kind, cudaStream_t) {
    for (size_t row = 0; row < rows.height && kind == cudaMemcpyDeviceToHost; ++row) {
        auto * words = reinterpret_cast<uint32_t *>(rows.to + row * rows.to_pitch);
        for (size_t i = 0; i < std::min(rows.width, MOST_WRITTEN) / 4; ++i) {
            words[i] = static_cast<uint32_t>(1 + i % N_DIFFERENT);
        }
    }
    if (kind == cudaMemcpyDeviceToDevice) {
        launch(null_gpu_launches("copy on the GPU"));
    }
    return cudaSuccess;
}

static cudaError_t set(void *, int, size_t, cudaStream_t) {
    launch(null_gpu_launches("fill on the GPU"));
    return cudaSuccess;
}

static void synchronize(cudaStream_t) {
    if (null_gpu_captured() != nullptr) {
        fail("a stream is waited for while it is captured");
    }
}
static void synchronize_all() {}
static void record(cudaEvent_t, cudaStream_t) {}
static void wait_for_event(cudaStream_t, cudaEvent_t) {}
static void synchronize_event(cudaEvent_t) {}

#include "cuda_runtime_calls.h"

EXPORT void ** __cudaRegisterFatBinary(void *) {
    static void * handle = nullptr;
    return &handle;
}

EXPORT void __cudaRegisterFunction(void **, const char * host_function, char *, const char * name,
                                   int, uint3 *, uint3 *, dim3 *, dim3 *, int *) {
    kernels_[host_function] = null_gpu_launches(name);
}

EXPORT cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) {
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
    null_gpu_captured() = new Graph;
    ++counts().captures;
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
    ++counts().graph_updates;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t) {
    ++counts().graph_launches;
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
        ++counts().cublas_calls;                                                                   \
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
