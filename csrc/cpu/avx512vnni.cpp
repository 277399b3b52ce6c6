#include "instruction_sets.h"

#if defined(__AVX512VNNI__)

#if !defined(__clang__)
// GCC 12 warns of its own intrinsics (its bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "q8_0.h"
#include "vector512.h"

namespace dfl::cpu {

namespace {

constexpr PackedProduct LIST[] = {
    product<Vector512, Q8_0>("q8_0 avx512vnni"),
};

} // namespace

PackedProducts avx512vnni_products() { return {LIST, sizeof LIST / sizeof LIST[0]}; }

} // namespace dfl::cpu

#else

namespace dfl::cpu {

PackedProducts avx512vnni_products() { return {nullptr, 0}; }

} // namespace dfl::cpu

#endif
