// Zeroed pages that take memory at the first write, and the bytes promised to them.
#include "device/zero_pages.h"

#include "check.h"
#include "device/backend.h"

#include <algorithm>
#include <cstring>

using namespace dfl;

namespace {

constexpr uint64_t MIB = 1 << 20, SIZE = 256 * MIB + 1000;

void test_pages() {
    CHECK(untouched_bytes() == 0);
    {
        const std::shared_ptr<void> pages = zero_pages(SIZE);
        CHECK(untouched_bytes() >= SIZE);
        auto * bytes = static_cast<char *>(pages.get());
        std::memset(bytes + 100 * MIB, 1, 50 * MIB);
        const uint64_t left = untouched_bytes();
        CHECK(left <= SIZE - 50 * MIB + MIB);
        CHECK(left >= SIZE - 54 * MIB); // the system may commit whole huge pages
        CHECK(bytes[0] == 0 && bytes[SIZE - 1] == 0 && bytes[100 * MIB] == 1);
    }
    CHECK(untouched_bytes() == 0);
    CHECK(zero_pages(uint64_t(1) << 60) == nullptr);
}

void test_caches() {
    const Backend backend(cpu_device(), 1);
    ggml_context_ptr ctx(ggml_init({2 * ggml_tensor_overhead(), nullptr, true}));
    ggml_tensor * cache = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, 64 * MIB);
    ggml_tensor * after = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, 7);
    const uint64_t free = free_bytes(cpu_device());
    const Allocation memory = backend.allocate(ctx.get(), "a cache");
    CHECK(memory.bytes >= ggml_nbytes(cache) + ggml_nbytes(after));
    CHECK(untouched_bytes() >= ggml_nbytes(cache));
    // Promised bytes count as used.
    CHECK(free_bytes(cpu_device()) <= free - ggml_nbytes(cache) / 2);
    CHECK(contains(error_of([&] { backend.check_fits(free, "another cache"); }),
                   "another cache needs "));
    auto * last = static_cast<float *>(after->data);
    std::fill(last, last + 7, 1.0f);
    CHECK(static_cast<const float *>(cache->data)[64 * MIB - 1] == 0.0f);
    CHECK(untouched_bytes() >= ggml_nbytes(cache) - 4 * MIB);
}

} // namespace

int main() {
    test_pages();
    test_caches();
    return 0;
}
