// Products of quantised weights for vectors with an instruction that multiplies 4 unsigned with 4
// signed bytes and adds the products to a 32-bit integer. Everything has internal linkage: the
// linker must not merge copies for different instruction sets.
#pragma once

#include "cpu/simd/rows.h"

namespace dfl::cpu {
namespace {

// Base class of a vector type V, which derives from the vector type Base and has dot_four().
template <class V, class Base>
struct DotFour : Base {
    using typename Base::F;
    using typename Base::I;
    static constexpr int32_t SIGNED_OFFSET = 128; // offset that is added to stored signed weights

    using Total = F; // of scaled products
    using Scale = F;
    template <bool HAS_SIGN>
    static F scale(const uint8_t * p) {
        return HAS_SIGN ? Base::signed_bytes(p) : Base::unsigned_bytes(p);
    }
    static F total_to_float(F total) { return total; }

    // Returns the start of a sum over weights stored with an offset, from two partial sums of x.
    static int32_t start_of(int32_t low, int32_t high, int32_t offset) {
        return -offset * (low + high);
    }

    // Computes sum[t][r] = start(r) + products of 4 * N inputs of each tile t and row r. start is
    // ignored if the format has no offset. weights(t, k): 4 inputs of every output of a tile,
    // unsigned. x[r] + at: the inputs of row r.
    template <class Format, int N, int TILES, int R, class Weights, class Start>
    static void dot(I (&sum)[TILES][R], Weights weights, const Rows<R> & x, int64_t at,
                    Start start) {
        for (int t = 0; t < TILES; ++t) {
            for (int r = 0; r < R; ++r) {
                sum[t][r] = Base::spread(Format::OFFSET != 0 ? start(r) : int32_t(0));
            }
        }
        for_each<N>([&](auto k) __attribute__((always_inline)) {
            I w[TILES];
            for (int t = 0; t < TILES; ++t) {
                w[t] = weights(t, k);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const I four = Base::spread_four(x[r] + at + 4 * k);
#pragma GCC unroll 2
                for (int t = 0; t < TILES; ++t) {
                    sum[t][r] = V::dot_four(sum[t][r], w[t], four);
                }
            }
        });
    }

    // Adds products like those of dot(), times scales, to total.
    template <class Format, int N, int TILES, int R, class Weights, class ScaleOf, class Start>
    static void add_products(F (&total)[TILES][R], Weights weights, ScaleOf scale,
                             const Rows<R> & x, int64_t at, Start start) {
        I sum[TILES][R];
        dot<Format, N>(sum, weights, x, at, start);
        for (int t = 0; t < TILES; ++t) {
            const F of_tile = scale(t);
            for (int r = 0; r < R; ++r) {
                total[t][r] = Base::mul_add(Base::to_float(sum[t][r]), of_tile, total[t][r]);
            }
        }
    }
};

} // namespace
} // namespace dfl::cpu
