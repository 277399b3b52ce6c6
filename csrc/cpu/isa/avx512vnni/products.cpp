#include "cpu/matmul/product_lists.h"

#if defined(__AVX512VNNI__)

#if !defined(__clang__)
// GCC 12 warns of its own intrinsics (its bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include "cpu/matmul/iq4_nl.h"
#include "cpu/matmul/iq4_xs.h"
#include "cpu/matmul/q2_k.h"
#include "cpu/matmul/q4_0.h"
#include "cpu/matmul/q4_k.h"
#include "cpu/matmul/q6_k.h"
#include "cpu/matmul/q8_0.h"
#include "cpu/simd/vector512.h"

namespace dfl::cpu {

namespace {

constexpr PackedProduct LIST[] = {
    product<Blocks32<Vector512, Q4_0>>("q4_0 avx512vnni"),
    product<Blocks32<Vector512, Q4_1>>("q4_1 avx512vnni"),
    product<Blocks32<Vector512, Q5_0>>("q5_0 avx512vnni"),
    product<Blocks32<Vector512, Q5_1>>("q5_1 avx512vnni"),
    product<Blocks32<Vector512, Q8_0>>("q8_0 avx512vnni"),
    product<Blocks32<Vector512, IQ4_NL>>("iq4_nl avx512vnni"),
    product<Blocks32<Vector512, MXFP4>>("mxfp4 avx512vnni"),
    product<Q2_K<Vector512>>("q2_k avx512vnni"),
    product<Q3_K<Vector512>>("q3_k avx512vnni"),
    product<Q4_K<Vector512>>("q4_k avx512vnni"),
    product<Q5_K<Vector512>>("q5_k avx512vnni"),
    product<Q6_K<Vector512>>("q6_k avx512vnni"),
    product<IQ4_XS<Vector512>>("iq4_xs avx512vnni"),
};

} // namespace

PackedProducts avx512vnni_products() { return {LIST, sizeof LIST / sizeof LIST[0]}; }

} // namespace dfl::cpu

#else

namespace dfl::cpu {

PackedProducts avx512vnni_products() { return {nullptr, 0}; }

} // namespace dfl::cpu

#endif
