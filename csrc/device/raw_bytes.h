// Bytes on the host that are written before they are read.
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

// Leaves what it allocates as it is, and asks for large pages where there is much: to zero 150 MiB
// page by page takes longer than to copy a state there.
template <typename T>
struct RawAllocator {
    using value_type = T;
    static constexpr size_t LARGE = size_t(2) << 20; // a large page

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
            madvise(memory, bytes, MADV_HUGEPAGE); // it may refuse
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
