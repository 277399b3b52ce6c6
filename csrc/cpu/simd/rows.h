// Pointers to rows of equal length, and loops over constants. Everything has internal linkage: the
// linker must not merge copies for different instruction sets.
#pragma once

#include <cstdint>
#include <immintrin.h>

namespace dfl::cpu {
namespace {

template <class Body, int... I>
[[gnu::always_inline]] inline void for_each(std::integer_sequence<int, I...>, Body && body) {
    (body(std::integral_constant<int, I>()), ...);
}
// Calls body(0) to body(N - 1), with compile-time constants. Inlined always: GCC would else keep
// the sums of a body in memory.
template <int N, class Body>
[[gnu::always_inline]] inline void for_each(Body && body) {
    for_each(std::make_integer_sequence<int, N>(), body);
}

// Kernels prefetch weights AHEAD bytes ahead into the cache TO, in the product with the first group
// of rows of x only: later groups find the weights in the cache. A core can wait for about twice as
// many cache lines on their way to L2 as to L1.
// Distances from 16 to 32 KiB were equally fast on Zen 4 and Zen 5.
struct FetchToL2 {
    static constexpr int64_t AHEAD = 16384;
    static constexpr auto TO = _MM_HINT_T1;
};
// Prefetches of weights that are whole bytes, on AVX2. A product of Q8_0 with one row of x is 1.1
// times as fast as with FetchToL2 if the weights come from memory, 1.2 times from the L3 cache;
// narrower weights lose 7 % from memory with two threads (Zen 5).
struct FetchToL1 {
    static constexpr int64_t AHEAD = 8192;
    static constexpr auto TO = _MM_HINT_T0;
};

// Pointers to R rows. x86 addressing modes reach three rows from one pointer, to save registers.
template <int R>
struct Rows {
    const uint8_t * base[(R + 2) / 3];
    int64_t stride;
    int64_t ahead; // distance in bytes of weight prefetches; 0: none

    Rows(const uint8_t * first, int64_t stride, int64_t ahead) : stride(stride), ahead(ahead) {
        for (int i = 0; i < (R + 2) / 3; ++i) {
            base[i] = first + 3 * i * stride;
        }
    }
    const uint8_t * operator[](int r) const { return base[r / 3] + (r % 3) * stride; }
    void advance(int64_t bytes) {
        for (auto & pointer : base) {
            pointer += bytes;
        }
    }
};

} // namespace
} // namespace dfl::cpu
