// Loads and stores vectors of rows whose length is no multiple of the vector length, V::T.
#pragma once

#include <algorithm>
#include <cstdint>

namespace dfl::cpu {
namespace {

template <class V>
struct PartsOfRows {
    using F = typename V::F;

    // Loads x[i] and the values after it; zeros from x[n] on.
    static F load(const float * x, int64_t i, int64_t n) {
        if (i + V::T <= n) {
            return V::load(x + i);
        }
        float rest[V::T] = {};
        std::copy(x + i, x + n, rest);
        return V::load(rest);
    }

    static void store(float * to, int64_t i, int64_t n, F x) {
        if (i + V::T <= n) {
            V::store(to + i, x);
            return;
        }
        float rest[V::T];
        V::store(rest, x);
        std::copy(rest, rest + (n - i), to + i);
    }
};

} // namespace
} // namespace dfl::cpu
