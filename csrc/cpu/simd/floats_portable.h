// 8 floats in plain C++, with the operations that floats256.h describes. Compilers may vectorise
// the loops, but must not fuse products and sums nor reorder sums.
#pragma once

#include "cpu/simd/exp_lanes.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <ggml.h>
#include <utility>

namespace dfl::cpu {
namespace {

struct FloatsPortable {
    static constexpr const char * NAME = "portable";
    static constexpr int T = 8;
    static constexpr int WIDE = 1;
    static constexpr bool HAS_REGISTERS = false;
    static constexpr int PRODUCT_ROWS = 2;
    struct F {
        float at[T];
    };

    template <class Of>
    static F each(Of of) {
        F all;
        for (int i = 0; i < T; ++i) {
            all.at[i] = of(i);
        }
        return all;
    }

    static F zero() { return F{}; }
    static F spread(float x) {
        return each([&](int) { return x; });
    }
    static F load(const float * p) {
        F all;
        std::memcpy(all.at, p, sizeof all.at);
        return all;
    }
    static float half(uint16_t x) { return ggml_fp16_to_fp32(x); }
    static F halves(const uint16_t * p) {
        uint16_t bits[T];
        std::memcpy(bits, p, sizeof bits);
#if defined(__ARM_FP16_FORMAT_IEEE)
        __fp16 halves[T];
        std::memcpy(halves, bits, sizeof bits);
        return each([&](int i) { return static_cast<float>(halves[i]); });
#else
        return each([&](int i) { return ggml_fp16_to_fp32(bits[i]); });
#endif
    }
    static void store(float * p, F x) { std::memcpy(p, x.at, sizeof x.at); }
    struct H {
        uint16_t at[T];
    };
    static H load(const uint16_t * p) {
        H all;
        std::memcpy(all.at, p, sizeof all.at);
        return all;
    }
    static void store(uint16_t * p, H x) { std::memcpy(p, x.at, sizeof x.at); }
    static void store_halves(uint16_t * p, F x) {
        for (int i = 0; i < T; ++i) {
            p[i] = ggml_fp32_to_fp16(x.at[i]);
        }
    }
    static F brains(const uint16_t * p) {
        uint16_t bits[T];
        std::memcpy(bits, p, sizeof bits);
        return each([&](int i) {
            const uint32_t wide = static_cast<uint32_t>(bits[i]) << 16;
            float value;
            std::memcpy(&value, &wide, sizeof value);
            return value;
        });
    }
    static F add(F a, F b) {
        return each([&](int i) { return a.at[i] + b.at[i]; });
    }
    static F sub(F a, F b) {
        return each([&](int i) { return a.at[i] - b.at[i]; });
    }
    static F mul(F a, F b) {
        return each([&](int i) { return a.at[i] * b.at[i]; });
    }
    static F divide(F a, F b) {
        return each([&](int i) { return a.at[i] / b.at[i]; });
    }
    static F max(F a, F b) { // returns b if a or b is NaN
        return each([&](int i) { return a.at[i] > b.at[i] ? a.at[i] : b.at[i]; });
    }
    static F round(F x) {
        return each([&](int i) { return std::nearbyint(x.at[i]); });
    }
    static F times_power_of_two(F x, F n) {
        return each([&](int i) { return std::ldexp(x.at[i], static_cast<int>(n.at[i])); });
    }
    static F zero_below(F x, float limit, F y) {
        return each([&](int i) { return x.at[i] < limit ? 0.0f : y.at[i]; });
    }
    static F exp(F x) { return exp_lanes<FloatsPortable>(x); }
    static F where_negative(F x, F a, F b) {
        return each([&](int i) { return x.at[i] < 0.0f ? a.at[i] : b.at[i]; });
    }
    static F even(F x) {
        return each([&](int i) { return x.at[i & ~1]; });
    }
    static F odd(F x) {
        return each([&](int i) { return x.at[i | 1]; });
    }
    static F swapped(F x) {
        return each([&](int i) { return x.at[i ^ 1]; });
    }
    static F sub_add(F a, F b) {
        return each([&](int i) { return i % 2 == 0 ? a.at[i] - b.at[i] : a.at[i] + b.at[i]; });
    }
    static F mul_add(F a, F b, F c) {
        return each([&](int i) {
#if defined(__FP_FAST_FMAF) || defined(FP_FAST_FMAF)
            return std::fma(a.at[i], b.at[i], c.at[i]);
#else
            return a.at[i] * b.at[i] + c.at[i];
#endif
        });
    }
    template <class Row>
    static void transpose(Row (&r)[T]) {
        for (int i = 0; i < T; ++i) {
            for (int j = 0; j < i; ++j) {
                std::swap(r[i].at[j], r[j].at[i]);
            }
        }
    }
    static float largest(F x) {
        float maximum = x.at[0];
        for (int i = 1; i < T; ++i) {
            maximum = x.at[i] > maximum ? x.at[i] : maximum;
        }
        return maximum;
    }
    static void sums(const F (&x)[4], float * to) {
        for (int i = 0; i < 4; ++i) {
            const float * v = x[i].at;
            to[i] = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
        }
    }
};

} // namespace
} // namespace dfl::cpu
