// Conversions between types, and moves, which may split or join registers.
#include "decoder.h"
#include "elementwise.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace soft_gpu {

namespace {

constexpr auto same = [](auto value) { return value; };
constexpr auto round_nearest = [](auto value) { return std::nearbyint(value); };
constexpr auto round_to_zero = [](auto value) { return std::trunc(value); };
constexpr auto round_down = [](auto value) { return std::floor(value); };
constexpr auto round_up = [](auto value) { return std::ceil(value); };
constexpr auto saturate = [](auto a) { return a > 0 ? (a < 1 ? a : decltype(a)(1)) : 0; };
constexpr auto round_to_tf32 = [](u32 bits) { return (bits + 0x1000) & ~0x1fffu; };

template <class To>
constexpr auto truncate = [](auto value) {
    const f64 exact = static_cast<f64>(value);
    constexpr To LOWEST = std::numeric_limits<To>::min(), HIGHEST = std::numeric_limits<To>::max();
    return exact != exact                       ? To(0)
           : exact <= static_cast<f64>(LOWEST)  ? LOWEST
           : exact >= static_cast<f64>(HIGHEST) ? HIGHEST
                                                : static_cast<To>(exact);
};
template <class To>
constexpr auto clamp = [](auto value) {
    const __int128 exact = value, lowest = std::numeric_limits<To>::min(),
                   highest = std::numeric_limits<To>::max();
    return static_cast<To>(std::min(std::max(exact, lowest), highest));
};

template <class To, class From>
constexpr Execute converter(bool is_clamped) {
    if constexpr (IS_FLOAT<From> && !IS_FLOAT<To>) {
        return elementwise<truncate<To>, To, From>;
    } else if constexpr (!IS_FLOAT<From> && !IS_FLOAT<To>) {
        return is_clamped ? elementwise<clamp<To>, To, From> : elementwise<same, To, From>;
    } else {
        return elementwise<same, To, From>;
    }
}

using Scalars = Types<u8, s8, u16, s16, u32, s32, u64, s64, f16, bf16, f32, f64>;

template <class To, class... From>
Execute choose_from(Type from, bool is_clamped, Types<From...>) {
    Execute found = nullptr;
    ((from == type_of<From>() ? void(found = converter<To, From>(is_clamped)) : void()), ...);
    return found;
}
template <class... To>
Execute choose_converter(Type to, Type from, bool is_clamped, Types<To...>) {
    Execute found = nullptr;
    ((to == type_of<To>() ? void(found = choose_from<To>(from, is_clamped, Scalars())) : void()),
     ...);
    return found;
}
Execute converter(Type to, Type from, bool is_clamped = false) {
    return choose_converter(to, from, is_clamped, Scalars());
}

Type integer_of(size_t bytes, bool is_signed) {
    return bytes == 1   ? (is_signed ? Type::S8 : Type::U8)
           : bytes == 2 ? (is_signed ? Type::S16 : Type::U16)
           : bytes == 4 ? (is_signed ? Type::S32 : Type::U32)
                        : (is_signed ? Type::S64 : Type::U64);
}
bool is_signed(Type type) {
    return type == Type::S8 || type == Type::S16 || type == Type::S32 || type == Type::S64;
}

struct Step {
    Execute execute;
    size_t bytes; // of its result
};

void decode_scalar(Decoder & decoder, const Statement & statement, Instruction & instruction) {
    using Single = Types<f16, f32, f64>;
    static constexpr Execute (*ROUND[])(Type) = {
        choose<round_nearest, 1, Single>, choose<round_to_zero, 1, Single>,
        choose<round_down, 1, Single>, choose<round_up, 1, Single>};
    const Type to = statement.types[0], from = statement.types[1];
    const int rounding = statement.which({"rni", "rzi", "rmi", "rpi"});
    const bool is_saturated = statement.has("sat");
    size_t to_bytes = 0, from_bytes = 0;
    const Register target = decoder.write(statement.operand(0), bytes_of(to), &to_bytes);
    Register source = decoder.read(statement.operand(1), bytes_of(from), &from_bytes);
    std::vector<Step> steps;
    if (from_bytes != bytes_of(from)) {
        require(!is_float(from), "a float in a register of another size");
        steps.push_back({converter(from, integer_of(from_bytes, false)), bytes_of(from)});
    }
    if (rounding >= 0 && is_float(from)) {
        steps.push_back({ROUND[rounding](from), bytes_of(from)});
    }
    if (to != from || steps.empty()) {
        steps.push_back({converter(to, from, is_saturated && !is_float(to)), bytes_of(to)});
    }
    if (is_saturated && is_float(to)) {
        steps.push_back({choose<saturate, 1, Floats>(to), bytes_of(to)});
    }
    if (to_bytes != bytes_of(to)) {
        require(!is_float(to) && to_bytes > bytes_of(to), "a result in a register of another size");
        steps.push_back({converter(integer_of(to_bytes, is_signed(to)), to), to_bytes});
    }
    for (size_t i = 0; i < steps.size(); ++i) {
        require(steps[i].execute != nullptr, "unknown type");
        const bool is_last = i + 1 == steps.size();
        instruction.execute = steps[i].execute;
        instruction.source[0] = source;
        instruction.target = is_last ? target : decoder.temporary(steps[i].bytes);
        source = instruction.target;
        if (!is_last) {
            decoder.emit(instruction);
        }
    }
}

template <class T>
constexpr auto join = [](f32 high, f32 low) { return Pair<T>{T(low), T(high)}; };

void decode_convert(Decoder & decoder, const Statement & statement, Instruction & instruction) {
    require(statement.types.size() == 2, "two types are expected");
    const Type to = statement.types[0], from = statement.types[1];
    if (to == Type::F16X2 || to == Type::BF16X2) {
        require(from == Type::F32, "unknown type");
        instruction.execute = to == Type::F16X2 ? elementwise<join<f16>, Pair<f16>, f32, f32>
                                                : elementwise<join<bf16>, Pair<bf16>, f32, f32>;
        decoder.operands(statement, instruction, 4, {4, 4});
    } else if (to == Type::TF32) {
        require(statement.has("rna") && from == Type::F32, "unknown rounding");
        instruction.execute = elementwise<round_to_tf32, u32, u32>;
        decoder.operands(statement, instruction, 4, {4});
    } else {
        decode_scalar(decoder, statement, instruction);
    }
}

template <class Part>
void join_parts(Warp & warp, const Instruction & instruction) {
    const int n = instruction.count;
    Part * target = warp.at<Part>(instruction.target);
    for (int i = 0; i < n; ++i) {
        const Part * part = warp.at<Part>(instruction.list[i]);
        for_lanes(warp, [&](int lane) { target[lane * n + i] = part[lane]; });
    }
}

template <class Part>
void split_parts(Warp & warp, const Instruction & instruction) {
    const int n = instruction.count;
    const Part * source = warp.at<Part>(instruction.source[0]);
    for (int i = 0; i < n; ++i) {
        if (instruction.list[i] != NO_REGISTER) {
            Part * part = warp.at<Part>(instruction.list[i]);
            for_lanes(warp, [&](int lane) { part[lane] = source[lane * n + i]; });
        }
    }
}

template <class Part>
constexpr Execute mover(bool joins, bool splits) {
    return joins ? join_parts<Part> : splits ? split_parts<Part> : elementwise<same, Part, Part>;
}

void decode_move(Decoder & decoder, const Statement & statement, Instruction & instruction) {
    const size_t bytes = bytes_of(statement.type());
    const std::string &to = statement.operand(0), &from = statement.operand(1);
    const bool splits = to[0] == '{', joins = from[0] == '{';
    size_t part = bytes;
    if (splits || joins) {
        const std::string & parts = splits ? to : from;
        part = bytes / (std::count(parts.begin(), parts.end(), ',') + 1);
        instruction.count = static_cast<u8>(decoder.list(parts, part, instruction.list));
    }
    if (statement.type() == Type::PRED) {
        bool negated = false;
        instruction.source[0] = decoder.predicate(from, negated);
        require(!negated, "a negated operand");
    } else if (!joins) {
        instruction.source[0] = decoder.read(from, bytes);
    }
    if (!splits) {
        instruction.target = decoder.write(to, bytes);
    }
    instruction.execute = part == 1   ? mover<u8>(joins, splits)
                          : part == 2 ? mover<u16>(joins, splits)
                          : part == 4 ? mover<u32>(joins, splits)
                          : part == 8 ? mover<u64>(joins, splits)
                                      : Execute(nullptr);
}

} // namespace

const std::vector<Operation> CONVERSIONS = {{"cvt", decode_convert}, {"mov", decode_move}};

} // namespace soft_gpu
