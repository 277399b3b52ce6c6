// Arithmetic of integers and floats whose operands and result have one type, or twice its width.
#include "decoder.h"
#include "elementwise.h"

#include <cmath>

namespace soft_gpu {

namespace {

constexpr auto add = [](auto a, auto b) { return a + b; };
constexpr auto subtract = [](auto a, auto b) { return a - b; };
constexpr auto negate = [](auto a) { return -a; };
constexpr auto lesser = [](auto a, auto b) { return b < a ? b : a; };
constexpr auto greater = [](auto a, auto b) { return a < b ? b : a; };
constexpr auto divide_float = [](auto a, auto b) { return a / b; };
constexpr auto reciprocal = [](auto a) { return 1 / a; };
constexpr auto root = [](auto a) { return std::sqrt(a); };
constexpr auto inverse_root = [](auto a) { return 1 / std::sqrt(a); };
constexpr auto power_of_2 = [](f32 a) { return std::exp2(a); };
constexpr auto logarithm_of_2 = [](f32 a) { return std::log2(a); };
constexpr auto sine = [](f32 a) { return std::sin(a); };
constexpr auto cosine = [](f32 a) { return std::cos(a); };
constexpr auto hyperbolic_tangent = [](f32 a) { return std::tanh(a); };
constexpr auto saturate = [](auto a) { return a > 0 ? (a < 1 ? a : decltype(a)(1)) : 0; };

constexpr auto magnitude = [](auto a) {
    if constexpr (std::is_floating_point_v<decltype(a)>) {
        return std::fabs(a);
    } else {
        return a < 0 ? -a : a;
    }
};

// 16-bit products are computed unsigned: as int, 65535 * 65535 overflows.
constexpr auto multiply = [](auto a, auto b) {
    if constexpr (sizeof(a) == 2) {
        return static_cast<u32>(a) * static_cast<u32>(b);
    } else {
        return a * b;
    }
};
constexpr auto multiply_add = [](auto a, auto b, auto c) { return multiply(a, b) + c; };

template <class T>
auto wide(T value) {
    using Signed = std::conditional_t<sizeof(T) == 8, __int128, s64>;
    using Unsigned = std::conditional_t<sizeof(T) == 8, unsigned __int128, u64>;
    return static_cast<std::conditional_t<std::is_signed_v<T>, Signed, Unsigned>>(value);
}
constexpr auto multiply_wide = [](auto a, auto b) { return wide(a) * wide(b); };
constexpr auto multiply_add_wide = [](auto a, auto b, auto c) { return wide(a) * wide(b) + c; };
constexpr auto multiply_high = [](auto a, auto b) { return wide(a) * wide(b) >> 8 * sizeof(a); };
constexpr auto multiply_add_high = [](auto a, auto b, auto c) { return multiply_high(a, b) + c; };

// Division by zero gives all ones; the lowest integer by -1 overflows, which x86 would trap.
constexpr auto divide = [](auto a, auto b) {
    using T = decltype(a);
    return b == 0 ? T(-1) : std::is_signed_v<T> && b == T(-1) ? T(0 - a) : T(a / b);
};
constexpr auto remainder = [](auto a, auto b) {
    using T = decltype(a);
    return b == 0 ? a : std::is_signed_v<T> && b == T(-1) ? T(0) : T(a % b);
};

// Minimum and maximum ignore a NaN; -0 is less than +0.
constexpr auto lesser_number = [](auto a, auto b) {
    const auto smaller = a < b || (a == b && std::signbit(a)) ? a : b;
    return a != a ? b : b != b ? a : smaller;
};
constexpr auto greater_number = [](auto a, auto b) {
    const auto larger = a > b || (a == b && !std::signbit(a)) ? a : b;
    return a != a ? b : b != b ? a : larger;
};
constexpr auto lesser_or_nan = [](auto a, auto b) {
    return a != a ? a : b != b ? b : lesser_number(a, b);
};
constexpr auto greater_or_nan = [](auto a, auto b) {
    return a != a ? a : b != b ? b : greater_number(a, b);
};

// Moves a rounded result towards zero if the exact one, which differs by `error`, is nearer to it.
f32 to_zero(f32 result, f32 error, bool is_finite) {
    const bool is_too_far =
        (result > 0 && error < 0) || (result < 0 && error > 0) || (std::isinf(result) && is_finite);
    return bit_cast<f32>(bit_cast<u32>(result) - (is_too_far ? 1 : 0));
}
constexpr auto add_to_zero = [](f32 a, f32 b) {
    const f32 sum = a + b, part = sum - a;
    const f32 error = (a - (sum - part)) + (b - part);
    return to_zero(sum, error, std::isfinite(a) && std::isfinite(b));
};
constexpr auto multiply_to_zero = [](f32 a, f32 b) {
    const f32 product = a * b;
    return to_zero(product, std::fma(a, b, -product), std::isfinite(a) && std::isfinite(b));
};

f32 fuse(f32 a, f32 b, f32 c) { return std::fma(a, b, c); }
f64 fuse(f64 a, f64 b, f64 c) { return std::fma(a, b, c); }
bf16 fuse(bf16 a, bf16 b, bf16 c) {
    return bf16(std::fma(static_cast<f32>(a), static_cast<f32>(b), static_cast<f32>(c)));
}
// Rounds the sum in float32 to odd if it is inexact, so that rounding again to float16 is exact.
f16 fuse(f16 a, f16 b, f16 c) {
    const f32 product = static_cast<f32>(a) * static_cast<f32>(b); // exact
    const f32 added = static_cast<f32>(c), sum = product + added;
    const f32 part = sum - product;
    const f32 error = (product - (sum - part)) + (added - part);
    const u32 bits = bit_cast<u32>(sum);
    const bool is_even_and_inexact = (error < 0 || error > 0) && (bits & 1) == 0;
    const u32 step = (error > 0) == (sum > 0) ? 1 : ~0u;
    return static_cast<f16>(bit_cast<f32>(is_even_and_inexact ? bits + step : bits));
}
constexpr auto fused = [](auto a, auto b, auto c) { return fuse(a, b, c); };

} // namespace

template <>
constexpr bool ROUNDS_HALF<fused> = true;

namespace {

using F32 = Types<f32>;
using F32AndHalf = Types<f32, f16, Pair<f16>, bf16, Pair<bf16>>;
using Single = Types<f32, f64>;

struct Row {
    const char * name;
    size_t n_sources;
    Execute (*choose)(Type);
};

const Row ROWS[] = {
    {"add", 2, choose<add, 2, Numbers>},
    {"sub", 2, choose<subtract, 2, Numbers>},
    {"mul", 2, choose<multiply, 2, Numbers>},
    {"add.rz", 2, choose<add_to_zero, 2, F32>},
    {"mul.rz", 2, choose<multiply_to_zero, 2, F32>},
    {"mul.hi", 2, choose<multiply_high, 2, Integers>},
    {"mad", 3, choose<multiply_add, 3, Integers>},
    {"mad.hi", 3, choose<multiply_add_high, 3, Types<u32, s32, u64, s64>>},
    {"mad", 3, choose<fused, 3, Floats>},
    {"fma", 3, choose<fused, 3, Floats>},
    {"div", 2, choose<divide, 2, Integers>},
    {"div", 2, choose<divide_float, 2, Single>},
    {"rem", 2, choose<remainder, 2, Integers>},
    {"min", 2, choose<lesser, 2, Integers>},
    {"max", 2, choose<greater, 2, Integers>},
    {"min", 2, choose<lesser_number, 2, Floats>},
    {"max", 2, choose<greater_number, 2, Floats>},
    {"min.NaN", 2, choose<lesser_or_nan, 2, Floats>},
    {"max.NaN", 2, choose<greater_or_nan, 2, Floats>},
    {"neg", 1, choose<negate, 1, Types<s16, s32, s64, f16, bf16, f32, f64, Pair<f16>, Pair<bf16>>>},
    {"abs", 1, choose<magnitude, 1, Types<s16, s32, s64>>},
    {"abs", 1, choose<magnitude, 1, Floats>},
    {"rcp", 1, choose<reciprocal, 1, Single>},
    {"sqrt", 1, choose<root, 1, Single>},
    {"rsqrt", 1, choose<inverse_root, 1, Single>},
    {"ex2", 1, choose<power_of_2, 1, F32AndHalf>},
    {"lg2", 1, choose<logarithm_of_2, 1, F32>},
    {"sin", 1, choose<sine, 1, F32>},
    {"cos", 1, choose<cosine, 1, F32>},
    {"tanh", 1, choose<hyperbolic_tangent, 1, F32AndHalf>},
};

template <class T, class D>
bool choose_wide(Type type, Instruction & instruction, bool is_sum) {
    if (type == type_of<T>()) {
        instruction.execute = is_sum ? elementwise<multiply_add_wide, D, T, T, D>
                                     : elementwise<multiply_wide, D, T, T>;
    }
    return type == type_of<T>();
}

void decode_wide(Decoder & decoder, const Statement & statement, Instruction & instruction) {
    const Type type = statement.type();
    const size_t bytes = bytes_of(type);
    const bool is_sum = statement.mnemonic == "mad";
    const std::vector<size_t> product = {bytes, bytes}, sum = {bytes, bytes, 2 * bytes};
    decoder.operands(statement, instruction, 2 * bytes, is_sum ? sum : product);
    choose_wide<u16, u32>(type, instruction, is_sum) ||
        choose_wide<s16, s32>(type, instruction, is_sum) ||
        choose_wide<u32, u64>(type, instruction, is_sum) ||
        choose_wide<s32, s64>(type, instruction, is_sum);
}

void decode_arithmetic(Decoder & decoder, const Statement & statement, Instruction & instruction) {
    if (statement.has("wide")) {
        decode_wide(decoder, statement, instruction);
        return;
    }
    static const std::vector<std::string> VARIANTS = {"hi", "NaN", "rz"};
    const int variant = statement.which(VARIANTS);
    const std::string name =
        statement.mnemonic + (variant >= 0 ? "." + VARIANTS[variant] : std::string());
    const Type type = statement.type();
    for (const Row & row : ROWS) {
        const Execute execute = row.name == name ? row.choose(type) : nullptr;
        if (execute != nullptr) {
            const size_t bytes = bytes_of(type);
            instruction.execute = execute;
            decoder.operands(statement, instruction, bytes,
                             std::vector<size_t>(row.n_sources, bytes));
        }
    }
    if (statement.has("sat")) {
        Instruction unbounded = instruction;
        unbounded.target = decoder.temporary(bytes_of(type));
        instruction.execute = choose<saturate, 1, Floats>(type);
        instruction.source[0] = unbounded.target;
        require(unbounded.execute != nullptr && instruction.execute != nullptr, "unknown type");
        decoder.emit(unbounded);
    }
}

} // namespace

const std::vector<Operation> ARITHMETIC = [] {
    std::vector<Operation> all;
    for (const Row & row : ROWS) {
        all.push_back({row.name, decode_arithmetic});
    }
    return all;
}();

} // namespace soft_gpu
