// Types of PTX: names, sizes and the C++ types that hold their values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

namespace soft_gpu {

using u8 = uint8_t;
using s8 = int8_t;
using u16 = uint16_t;
using s16 = int16_t;
using u32 = uint32_t;
using s32 = int32_t;
using u64 = uint64_t;
using s64 = int64_t;
using f16 = _Float16;
using f32 = float;
using f64 = double;

// Reinterprets the bits of a value.
template <class To, class From>
To bit_cast(const From & from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

// The upper half of a float32, rounded to nearest even.
struct bf16 {
    u16 bits;
    bf16() = default;
    explicit bf16(f32 value) {
        const u32 whole = bit_cast<u32>(value);
        const bool is_nan = (whole & 0x7fffffff) > 0x7f800000;
        bits = static_cast<u16>(is_nan ? 0x7fff : (whole + 0x7fff + (whole >> 16 & 1)) >> 16);
    }
    explicit operator f32() const { return bit_cast<f32>(static_cast<u32>(bits) << 16); }
    explicit operator f64() const { return static_cast<f64>(static_cast<f32>(*this)); }
};

// Two values of 16 bits in one register.
template <class T>
struct Pair {
    T low, high;
};
template <class T>
constexpr bool IS_PAIR = false;
template <class T>
constexpr bool IS_PAIR<Pair<T>> = true;
template <class T>
constexpr bool IS_HALF = std::is_same_v<T, f16> || std::is_same_v<T, bf16>;
template <class T>
constexpr bool IS_FLOAT = std::is_floating_point_v<T> || IS_HALF<T>;

enum class Type : u8 {
    NONE,
    PRED,
    U8,
    S8,
    U16,
    S16,
    U32,
    S32,
    U64,
    S64,
    B128,
    F16,
    BF16,
    F32,
    F64,
    TF32,
    F16X2,
    BF16X2
};

// Returns the type of a name without its dot, Type::NONE for other words. Untyped bits are
// unsigned.
Type type_of(const std::string & name);
size_t bytes_of(Type type);
bool is_float(Type type);

template <class T>
constexpr Type type_of() {
    return std::is_same_v<T, u8>           ? Type::U8
           : std::is_same_v<T, s8>         ? Type::S8
           : std::is_same_v<T, u16>        ? Type::U16
           : std::is_same_v<T, s16>        ? Type::S16
           : std::is_same_v<T, u32>        ? Type::U32
           : std::is_same_v<T, s32>        ? Type::S32
           : std::is_same_v<T, u64>        ? Type::U64
           : std::is_same_v<T, s64>        ? Type::S64
           : std::is_same_v<T, f16>        ? Type::F16
           : std::is_same_v<T, bf16>       ? Type::BF16
           : std::is_same_v<T, f32>        ? Type::F32
           : std::is_same_v<T, f64>        ? Type::F64
           : std::is_same_v<T, Pair<f16>>  ? Type::F16X2
           : std::is_same_v<T, Pair<bf16>> ? Type::BF16X2
                                           : Type::NONE;
}

template <class... T>
struct Types {};
using Integers = Types<u16, s16, u32, s32, u64, s64>;
using Words = Types<u32, u64>;
using Floats = Types<f16, bf16, f32, f64, Pair<f16>, Pair<bf16>>;
using Numbers = Types<u16, s16, u32, s32, u64, s64, f16, bf16, f32, f64, Pair<f16>, Pair<bf16>>;

} // namespace soft_gpu
