// Pointers to rows of equal length, and loops over constants. Everything in here has internal
// linkage: each instruction set compiles its own, and none may stand in for another's.
#pragma once

#include <cstdint>

namespace dfl::cpu {
namespace {

template <class Body, int... I>
inline void for_each(std::integer_sequence<int, I...>, Body && body) {
    (body(std::integral_constant<int, I>()), ...);
}
// body(0) to body(N - 1), with arguments that are constants.
template <int N, class Body>
inline void for_each(Body && body) {
    for_each(std::make_integer_sequence<int, N>(), body);
}

// Reads the place of one row out of R. One pointer for three rows: the others are reached by the
// addressing modes of x86, so that 12 rows take 5 registers.
template <int R>
struct Rows {
    const uint8_t * base[(R + 2) / 3];
    int64_t stride;
    int64_t ahead; // bytes before their use that weights are fetched; 0: they are not

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
