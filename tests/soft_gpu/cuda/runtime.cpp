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

// The device reports the capability of SOFT_GPU_CAPABILITY; its PTX stays that of the module.
Device device() {
    const char * set = std::getenv("SOFT_GPU_CAPABILITY");
    return {"software GPU",
            set != nullptr ? std::atoi(set) : 86,
            86,
            static_cast<int>(settings().n_multiprocessors),
            MAX_SHARED_BYTES,
            1536};
}

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

void move(const Rows & rows) {
    for (size_t row = 0; row < rows.height; ++row) {
        std::memmove(rows.to + row * rows.to_pitch, rows.from + row * rows.from_pitch, rows.width);
    }
}

// Pageable host memory is read when the copy is asked for and written before the call returns;
// pinned memory when the stream gets there. A graph keeps the address of either.
cudaError_t copy(const Rows & rows, cudaMemcpyKind kind, cudaStream_t stream) {
    const std::string name = "copy of kind " + std::to_string(kind);
    const bool waits = !is_capturing(stream);
    if (waits && kind == cudaMemcpyHostToDevice && !is_pinned(rows.from)) {
        auto kept = std::make_shared<std::string>(rows.width * rows.height, '\0');
        move({kept->data(), rows.width, rows.from, rows.from_pitch, rows.width, rows.height});
        enqueue(stream, {name, [=] {
                             move({rows.to, rows.to_pitch, kept->data(), rows.width, rows.width,
                                   rows.height});
                         }});
        return cudaSuccess;
    }
    enqueue(stream, {name, [=] { move(rows); }});
    if (waits && kind == cudaMemcpyDeviceToHost && !is_pinned(rows.to)) {
        synchronize(stream);
    }
    return cudaSuccess;
}

cudaError_t set(void * to, int value, size_t bytes, cudaStream_t stream) {
    enqueue(stream, {"set", [=] { std::memset(to, value, bytes); }});
    return cudaSuccess;
}

} // namespace

#include "cuda_runtime_calls.h"
