// Logic, shifts, fields of bits, permuted bytes and dot products of bytes.
#include "decoder.h"
#include "elementwise.h"

#include <algorithm>

namespace soft_gpu {

namespace {

constexpr auto conjunction = [](auto a, auto b) { return a & b; };
constexpr auto disjunction = [](auto a, auto b) { return a | b; };
constexpr auto difference = [](auto a, auto b) { return a ^ b; };
constexpr auto complement = [](auto a) { return ~a; };
constexpr auto opposite = [](u8 a) { return a ^ 1; };
constexpr auto sign_of = [](u32 a, u32 b) { return (b & 0x7fffffff) | (a & 0x80000000); };

// Shifts by the width or more leave nothing, or the sign.
constexpr auto shift_left = [](auto a, u32 n) {
    return n >= 8 * sizeof(a) ? decltype(a)(0) : decltype(a)(a << n);
};
constexpr auto shift_right = [](auto a, u32 n) {
    constexpr u32 LAST = 8 * sizeof(a) - 1;
    if constexpr (std::is_signed_v<decltype(a)>) {
        return a >> std::min(n, LAST);
    } else {
        return n > LAST ? decltype(a)(0) : decltype(a)(a >> n);
    }
};
constexpr auto funnel_left = [](u32 low, u32 high, u32 n) {
    return (static_cast<u64>(high) << 32 | low) << (n & 31) >> 32;
};
constexpr auto funnel_right = [](u32 low, u32 high, u32 n) {
    return (static_cast<u64>(high) << 32 | low) >> (n & 31);
};
constexpr auto funnel_left_clamped = [](u32 low, u32 high, u32 n) {
    return (static_cast<u64>(high) << 32 | low) << std::min(n, 32u) >> 32;
};
constexpr auto funnel_right_clamped = [](u32 low, u32 high, u32 n) {
    return (static_cast<u64>(high) << 32 | low) >> std::min(n, 32u);
};

constexpr auto count_ones = [](auto a) { return __builtin_popcountll(a); };
constexpr auto count_leading_zeros = [](auto a) {
    return a == 0 ? 8 * sizeof(a) : __builtin_clzll(a) - (64 - 8 * sizeof(a));
};
// Returns the position of the highest bit that differs from the sign, all ones without one.
constexpr auto highest_bit = [](auto a) {
    using Unsigned = std::make_unsigned_t<decltype(a)>;
    const auto bits = static_cast<Unsigned>(a < 0 ? ~a : a);
    return bits == 0 ? ~0u : static_cast<u32>(63 - __builtin_clzll(bits));
};
constexpr auto reverse = [](auto a) {
    decltype(a) reversed = 0;
    for (size_t i = 0; i < 8 * sizeof(a); ++i) {
        reversed |= (a >> i & 1) << (8 * sizeof(a) - 1 - i);
    }
    return reversed;
};

template <class T>
T low_bits(u32 n) {
    return n >= 8 * sizeof(T) ? T(-1) : static_cast<T>((T(1) << n) - 1);
}
constexpr auto insert_field = [](auto field, auto into, u32 position, u32 length) {
    using T = decltype(field);
    const u32 at = position & 255;
    const T mask = at >= 8 * sizeof(T) ? T(0) : T(low_bits<T>(length & 255) << at);
    return (into & ~mask) | (at >= 8 * sizeof(T) ? T(0) : T(field << at & mask));
};
// A field that goes past the end of a signed value is filled with the sign.
constexpr auto extract_field = [](auto from, u32 position, u32 length) {
    using T = decltype(from);
    using Unsigned = std::make_unsigned_t<T>;
    constexpr u32 WIDTH = 8 * sizeof(T);
    const u32 at = position & 255, n = length & 255;
    if (n == 0) {
        return T(0);
    }
    const auto field =
        static_cast<Unsigned>(shift_right(static_cast<Unsigned>(from), at) & low_bits<Unsigned>(n));
    const u32 top = std::min(at + n - 1, WIDTH - 1);
    const bool is_negative = std::is_signed_v<T> && (from >> top & 1) != 0;
    const u32 n_kept = at + n > WIDTH ? (at < WIDTH ? WIDTH - at : 0) : n;
    return static_cast<T>(is_negative ? field | ~low_bits<Unsigned>(n_kept) : field);
};
constexpr auto mask_of = [](u32 position, u32 length) {
    return position >= 32 ? 0 : low_bits<u32>(length) << position;
};

constexpr auto permute_bytes = [](u32 low, u32 high, u32 selector) {
    const u64 bytes = static_cast<u64>(high) << 32 | low;
    u32 result = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 chosen = selector >> 4 * i & 15;
        const u32 byte = static_cast<u32>(bytes >> 8 * (chosen & 7)) & 255;
        result |= ((chosen & 8) != 0 ? (byte >> 7) * 255 : byte) << 8 * i;
    }
    return result;
};
constexpr auto look_up = [](u32 a, u32 b, u32 c, u32 table) {
    u32 result = 0;
    for (u32 row = 0; row < 8; ++row) {
        const u32 matches =
            ((row & 4) != 0 ? a : ~a) & ((row & 2) != 0 ? b : ~b) & ((row & 1) != 0 ? c : ~c);
        result |= matches & (0 - (table >> row & 1));
    }
    return result;
};

template <class A, class B>
u32 dot_bytes(u32 a, u32 b, u32 sum) {
    for (int i = 0; i < 4; ++i) {
        sum += static_cast<s32>(static_cast<A>(a >> 8 * i)) *
               static_cast<s32>(static_cast<B>(b >> 8 * i));
    }
    return sum;
}
constexpr auto dot_ss = [](u32 a, u32 b, u32 c) { return dot_bytes<s8, s8>(a, b, c); };
constexpr auto dot_su = [](u32 a, u32 b, u32 c) { return dot_bytes<s8, u8>(a, b, c); };
constexpr auto dot_us = [](u32 a, u32 b, u32 c) { return dot_bytes<u8, s8>(a, b, c); };
constexpr auto dot_uu = [](u32 a, u32 b, u32 c) { return dot_bytes<u8, u8>(a, b, c); };

// Operands of one row of the table: T is the instruction's type.
enum class Form { UNIFORM, COUNT, SHIFT, FIELD, INSERTION };

template <const auto & OPERATION, Form FORM, class T>
constexpr Execute formed() {
    if constexpr (FORM == Form::COUNT) {
        return elementwise<OPERATION, u32, T>;
    } else if constexpr (FORM == Form::SHIFT) {
        return elementwise<OPERATION, T, T, u32>;
    } else if constexpr (FORM == Form::FIELD) {
        return elementwise<OPERATION, T, T, u32, u32>;
    } else {
        return elementwise<OPERATION, T, T, T, u32, u32>;
    }
}

template <const auto & OPERATION, Form FORM, class... T>
Execute choose_form(Type type, Types<T...>) {
    Execute found = nullptr;
    ((type == type_of<T>() ? void(found = formed<OPERATION, FORM, T>()) : void()), ...);
    return found;
}
template <const auto & OPERATION, Form FORM, class List>
Execute choose_form(Type type) {
    return choose_form<OPERATION, FORM>(type, List());
}

struct Row {
    const char * name;
    Form form;
    size_t n_sources;
    Execute (*choose)(Type);
};

using U32 = Types<u32>;
using Wide = Types<u32, s32, u64, s64>;
const Row ROWS[] = {
    {"and", Form::UNIFORM, 2, choose<conjunction, 2, Types<u16, u32, u64>>},
    {"or", Form::UNIFORM, 2, choose<disjunction, 2, Types<u16, u32, u64>>},
    {"xor", Form::UNIFORM, 2, choose<difference, 2, Types<u16, u32, u64>>},
    {"not", Form::UNIFORM, 1, choose<complement, 1, Types<u16, u32, u64>>},
    {"shl", Form::SHIFT, 2, choose_form<shift_left, Form::SHIFT, Types<u16, u32, u64>>},
    {"shr", Form::SHIFT, 2, choose_form<shift_right, Form::SHIFT, Integers>},
    {"shf.l.wrap", Form::UNIFORM, 3, choose<funnel_left, 3, U32>},
    {"shf.r.wrap", Form::UNIFORM, 3, choose<funnel_right, 3, U32>},
    {"shf.l.clamp", Form::UNIFORM, 3, choose<funnel_left_clamped, 3, U32>},
    {"shf.r.clamp", Form::UNIFORM, 3, choose<funnel_right_clamped, 3, U32>},
    {"popc", Form::COUNT, 1, choose_form<count_ones, Form::COUNT, Words>},
    {"clz", Form::COUNT, 1, choose_form<count_leading_zeros, Form::COUNT, Words>},
    {"bfind", Form::COUNT, 1, choose_form<highest_bit, Form::COUNT, Wide>},
    {"brev", Form::UNIFORM, 1, choose<reverse, 1, Words>},
    {"bfe", Form::FIELD, 3, choose_form<extract_field, Form::FIELD, Wide>},
    {"bfi", Form::INSERTION, 4, choose_form<insert_field, Form::INSERTION, Words>},
    {"bmsk.clamp", Form::UNIFORM, 2, choose<mask_of, 2, U32>},
    {"prmt", Form::UNIFORM, 3, choose<permute_bytes, 3, U32>},
    {"lop3", Form::UNIFORM, 4, choose<look_up, 4, U32>},
    {"copysign", Form::UNIFORM, 2, choose<sign_of, 2, U32>},
};

void decode_bits(Decoder & decoder, const Statement & statement, Instruction & instruction) {
    std::string name = statement.mnemonic;
    for (const char * modifier : {"l", "r", "wrap", "clamp"}) {
        name += statement.has(modifier) ? std::string(".") + modifier : "";
    }
    const Type type = statement.type() == Type::F32 ? Type::U32 : statement.type();
    for (const Row & row : ROWS) {
        if (row.name != name) {
            continue;
        }
        instruction.execute = row.choose(type);
        require(instruction.execute != nullptr, "unknown type");
        const size_t bytes = bytes_of(type);
        std::vector<size_t> sources(row.n_sources, bytes);
        // Positions, lengths and counts have 32 bits.
        const size_t first = row.form == Form::INSERTION ? 2 : 1;
        for (size_t i = first; row.form != Form::UNIFORM && i < row.n_sources; ++i) {
            sources[i] = 4;
        }
        decoder.operands(statement, instruction, row.form == Form::COUNT ? 4 : bytes, sources);
    }
}

void decode_logic(Decoder & decoder, const Statement & statement, Instruction & instruction) {
    if (statement.type() != Type::PRED) {
        decode_bits(decoder, statement, instruction);
        return;
    }
    const std::string & name = statement.mnemonic;
    bool negated = false;
    instruction.target = decoder.write(statement.operand(0), 1);
    for (size_t i = 1; i < statement.operands.size(); ++i) {
        instruction.source[i - 1] = decoder.predicate(statement.operand(i), negated);
        require(!negated, "a negated operand");
    }
    instruction.execute = name == "not"   ? elementwise<opposite, u8, u8>
                          : name == "and" ? elementwise<conjunction, u8, u8, u8>
                          : name == "or"  ? elementwise<disjunction, u8, u8, u8>
                                          : elementwise<difference, u8, u8, u8>;
}

void decode_dot(Decoder & decoder, const Statement & statement, Instruction & instruction) {
    require(statement.types.size() == 2, "two types are expected");
    static constexpr Execute BY_SIGN[2][2] = {
        {elementwise<dot_ss, u32, u32, u32, u32>, elementwise<dot_su, u32, u32, u32, u32>},
        {elementwise<dot_us, u32, u32, u32, u32>, elementwise<dot_uu, u32, u32, u32, u32>}};
    instruction.execute = BY_SIGN[statement.types[0] == Type::U32][statement.types[1] == Type::U32];
    decoder.operands(statement, instruction, 4, {4, 4, 4});
}

} // namespace

const std::vector<Operation> BITS = {
    {"and", decode_logic},     {"or", decode_logic},   {"xor", decode_logic}, {"not", decode_logic},
    {"shl", decode_bits},      {"shr", decode_bits},   {"shf", decode_bits},  {"popc", decode_bits},
    {"clz", decode_bits},      {"bfind", decode_bits}, {"brev", decode_bits}, {"bfe", decode_bits},
    {"bfi", decode_bits},      {"bmsk", decode_bits},  {"prmt", decode_bits}, {"lop3", decode_bits},
    {"copysign", decode_bits}, {"dp4a", decode_dot},
};

} // namespace soft_gpu
