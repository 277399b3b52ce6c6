// Reads values of a K/V cache of any type as floats.
#pragma once

#include <cstdint>
#include <cstring>
#include <ggml.h>

namespace dfl::cpu {
namespace {

// Bits of a cached 16-bit value: F16 (Half), BF16 (Brain).
struct Half {
    uint16_t bits;
};
struct Brain {
    uint16_t bits;
};

// Calls body with a value whose C++ type stands for a K/V cache type: Half, Brain or float.
template <class Body>
inline void with_type(ggml_type type, Body && body) {
    switch (type) {
    case GGML_TYPE_F16:
        return body(Half());
    case GGML_TYPE_BF16:
        return body(Brain());
    default:
        return body(float());
    }
}

template <class V>
struct CellValues {
    using F = typename V::F;

    static constexpr int BLOCK = 32;

    static int64_t padded(int64_t n) { return (n + V::T - 1) / V::T * V::T; }

    static uint16_t half_at(const uint8_t * block, int offset) {
        uint16_t bits;
        std::memcpy(&bits, block + offset, sizeof bits);
        return bits;
    }

    static void q8_0(const uint8_t * block, float * to) {
        const float scale = V::half(half_at(block, 0));
        const auto * codes = reinterpret_cast<const int8_t *>(block + 2);
        for (int i = 0; i < BLOCK; ++i) {
            to[i] = scale * static_cast<float>(codes[i]);
        }
    }

    // Unpacks 4-bit codes to scale * (code - middle) + offset: low nibbles, then high nibbles.
    static void nibbles(const uint8_t * codes, float scale, float offset, int middle, float * to) {
        for (int i = 0; i < BLOCK / 2; ++i) {
            to[i] = scale * static_cast<float>((codes[i] & 15) - middle) + offset;
        }
        for (int i = 0; i < BLOCK / 2; ++i) {
            to[BLOCK / 2 + i] = scale * static_cast<float>((codes[i] >> 4) - middle) + offset;
        }
    }

    // Unpacks 5-bit codes, with fifth bits in `high`, to scale * (code - middle) + offset.
    static void fives(const uint8_t * high, const uint8_t * codes, float scale, float offset,
                      int middle, float * to) {
        uint32_t bits;
        std::memcpy(&bits, high, sizeof bits);
        for (int i = 0; i < BLOCK / 2; ++i) {
            const int code = (codes[i] & 15) | static_cast<int>(bits >> i & 1) << 4;
            to[i] = scale * static_cast<float>(code - middle) + offset;
        }
        for (int i = 0; i < BLOCK / 2; ++i) {
            const int code = codes[i] >> 4 | static_cast<int>(bits >> (i + 16) & 1) << 4;
            to[BLOCK / 2 + i] = scale * static_cast<float>(code - middle) + offset;
        }
    }

    template <class One>
    static void by_blocks(const void * from, int64_t n, int bytes, float * to, One && one) {
        const auto * block = static_cast<const uint8_t *>(from);
        for (int64_t i = 0; i < n; i += BLOCK, block += bytes) {
            one(block, to + i);
        }
    }

    static F read(const float * from) { return V::load(from); }
    static F read(const Half * from) { return V::halves(&from->bits); }
    static F read(const Brain * from) { return V::brains(&from->bits); }

    // Reads n cached values as floats; n is a multiple of the block size of the type.
    static void read(ggml_type type, const void * from, int64_t n, float * to) {
        switch (type) {
        case GGML_TYPE_F32:
            std::memcpy(to, from, n * sizeof(float));
            return;
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16: {
            const auto * values = static_cast<const uint16_t *>(from);
            const bool brain = type == GGML_TYPE_BF16;
            int64_t i = 0;
            for (; i + V::T <= n; i += V::T) {
                V::store(to + i, brain ? V::brains(values + i) : V::halves(values + i));
            }
            if (i < n) {
                uint16_t rest[V::T] = {};
                float wide[V::T];
                std::memcpy(rest, values + i, (n - i) * sizeof(uint16_t));
                V::store(wide, brain ? V::brains(rest) : V::halves(rest));
                std::memcpy(to + i, wide, (n - i) * sizeof(float));
            }
            return;
        }
        case GGML_TYPE_Q8_0:
            return by_blocks(from, n, 34, to, q8_0);
        case GGML_TYPE_Q4_0:
            return by_blocks(from, n, 18, to, [](const uint8_t * b, float * x) {
                nibbles(b + 2, V::half(half_at(b, 0)), 0.0f, 8, x);
            });
        case GGML_TYPE_Q4_1:
            return by_blocks(from, n, 20, to, [](const uint8_t * b, float * x) {
                nibbles(b + 4, V::half(half_at(b, 0)), V::half(half_at(b, 2)), 0, x);
            });
        case GGML_TYPE_Q5_0:
            return by_blocks(from, n, 22, to, [](const uint8_t * b, float * x) {
                fives(b + 2, b + 6, V::half(half_at(b, 0)), 0.0f, 16, x);
            });
        case GGML_TYPE_Q5_1:
            return by_blocks(from, n, 24, to, [](const uint8_t * b, float * x) {
                fives(b + 4, b + 8, V::half(half_at(b, 0)), V::half(half_at(b, 2)), 0, x);
            });
        default:
            ggml_get_type_traits(type)->to_float(from, to, n);
        }
    }
};

} // namespace
} // namespace dfl::cpu
