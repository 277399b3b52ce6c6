#include "device_memory.h"

#include "../memory_check.h"
#include "api.h"
#include "streams.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sys/mman.h>

namespace soft_gpu {

void fail(const std::string & why) {
    std::fprintf(stderr, "SOFT GPU FAILED: %s\n", why.c_str());
    std::fflush(stderr);
    std::abort();
}

namespace {

constexpr size_t PAGE = 4096, ALIGNMENT = 256;

struct Allocation {
    char * pages;
    size_t page_bytes, bytes;
};
std::mutex mutex;
std::map<void *, Allocation> allocations;

size_t rounded(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

} // namespace

void * reserve(size_t bytes) {
    void * at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? nullptr : at;
}

void map(void * at, size_t bytes) {
    if (mprotect(at, bytes, PROT_READ | PROT_WRITE) != 0) {
        fail("memory is mapped that was not reserved");
    }
    std::memset(at, 0xff, bytes);
    allow_memory(at, bytes);
}

void unmap(void * at, size_t bytes) {
    synchronize_all();
    forbid_memory(at);
    if (mprotect(at, bytes, PROT_NONE) != 0 || madvise(at, bytes, MADV_DONTNEED) != 0) {
        fail("memory is unmapped that was not mapped");
    }
}

void * allocate(size_t bytes) {
    if (!null_gpu_take(static_cast<int64_t>(bytes))) {
        return nullptr;
    }
    const size_t whole = rounded(bytes, ALIGNMENT), inner = rounded(whole, PAGE);
    char * pages = static_cast<char *>(reserve(inner + 2 * PAGE));
    if (pages == nullptr || mprotect(pages + PAGE, inner, PROT_READ | PROT_WRITE) != 0) {
        fail("the host has no memory for the GPU's");
    }
    char * at = pages + PAGE + inner - whole;
    std::memset(pages + PAGE, 0xff, inner);
    allow_memory(at, bytes);
    const std::lock_guard<std::mutex> lock(mutex);
    allocations[at] = {pages, inner + 2 * PAGE, bytes};
    return at;
}

void release(void * at) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = allocations.find(at);
    if (found == allocations.end()) {
        fail("memory is freed that was not allocated");
    }
    const Allocation & allocation = found->second;
    null_gpu_take(-static_cast<int64_t>(allocation.bytes));
    forbid_memory(at);
    munmap(allocation.pages, allocation.page_bytes);
    allocations.erase(found);
}

} // namespace soft_gpu
