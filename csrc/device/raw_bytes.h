// Bytes on the host that are not initialised.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace dfl {

// Allocator without zeroing and with large pages: zeroing a large state page by page takes longer
// than copying the state.
template <typename T>
struct RawAllocator {
    using value_type = T;
    static constexpr size_t LARGE = size_t(2) << 20;

    RawAllocator() = default;
    template <typename U>
    RawAllocator(const RawAllocator<U> & /*other*/) {}

    T * allocate(size_t n) {
        const size_t bytes = n * sizeof(T);
        const size_t alignment = bytes < LARGE ? alignof(std::max_align_t) : LARGE;
        void * memory =
            std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
        if (memory == nullptr) {
            throw std::bad_alloc();
        }
#ifdef __linux__
        if (bytes >= LARGE) {
            madvise(memory, bytes, MADV_HUGEPAGE); // the kernel may refuse large pages
        }
#endif
        return static_cast<T *>(memory);
    }
    void deallocate(T * bytes, size_t /*n*/) { std::free(bytes); }

    template <typename U>
    void construct(U * /*at*/) {}
    template <typename U, typename... Args>
    void construct(U * at, Args &&... args) {
        new (at) U(std::forward<Args>(args)...);
    }
    bool operator==(const RawAllocator & /*o*/) const { return true; }
    bool operator!=(const RawAllocator & /*o*/) const { return false; }
};

using RawBytes = std::vector<uint8_t, RawAllocator<uint8_t>>;

} // namespace dfl
