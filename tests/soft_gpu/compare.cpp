// Comparisons, which set predicates, and selection by a predicate.
#include "decoder.h"
#include "elementwise.h"

namespace soft_gpu {

namespace {

// Ordered comparisons are false for a NaN, those of the second group true.
constexpr auto equal = [](auto a, auto b) { return a == b; };
constexpr auto differs = [](auto a, auto b) { return a < b || a > b; };
constexpr auto less = [](auto a, auto b) { return a < b; };
constexpr auto less_equal = [](auto a, auto b) { return a <= b; };
constexpr auto more = [](auto a, auto b) { return a > b; };
constexpr auto more_equal = [](auto a, auto b) { return a >= b; };
constexpr auto equal_or_nan = [](auto a, auto b) { return !(a < b) && !(a > b); };
constexpr auto differs_or_nan = [](auto a, auto b) { return a != b; };
constexpr auto less_or_nan = [](auto a, auto b) { return !(a >= b); };
constexpr auto less_equal_or_nan = [](auto a, auto b) { return !(a > b); };
constexpr auto more_or_nan = [](auto a, auto b) { return !(a <= b); };
constexpr auto more_equal_or_nan = [](auto a, auto b) { return !(a < b); };
constexpr auto are_numbers = [](auto a, auto b) { return a == a && b == b; };
constexpr auto is_any_nan = [](auto a, auto b) { return a != a || b != b; };

constexpr auto conjunction = [](u8 a, u8 b) { return a & b; };
constexpr auto disjunction = [](u8 a, u8 b) { return a | b; };
constexpr auto difference = [](u8 a, u8 b) { return a ^ b; };
constexpr auto opposite = [](u8 a) { return a ^ 1; };
constexpr auto same = [](u8 a) { return a; };
constexpr auto select = [](auto a, auto b, u8 which) { return which != 0 ? a : b; };

template <const auto & OPERATION, class T>
void compare(Warp & warp, const Instruction & instruction) {
    if constexpr (IS_HALF<T>) {
        static constexpr auto widened = [](T a, T b) {
            return OPERATION(static_cast<f32>(a), static_cast<f32>(b));
        };
        elementwise<widened, u8, T, T>(warp, instruction);
    } else {
        elementwise<OPERATION, u8, T, T>(warp, instruction);
    }
}

template <const auto & OPERATION, class... T>
Execute choose_compare(Type type, Types<T...>) {
    Execute found = nullptr;
    ((type == type_of<T>() ? void(found = compare<OPERATION, T>) : void()), ...);
    return found;
}
template <const auto & OPERATION, class List>
Execute choose_compare(Type type) {
    return choose_compare<OPERATION>(type, List());
}

using Scalars = Types<u16, s16, u32, s32, u64, s64, f16, bf16, f32, f64>;
using ScalarFloats = Types<f16, bf16, f32, f64>;

struct Row {
    const char * name;
    Execute (*choose)(Type);
};
const Row ROWS[] = {
    {"eq", choose_compare<equal, Scalars>},
    {"ne", choose_compare<differs, Scalars>},
    {"lt", choose_compare<less, Scalars>},
    {"le", choose_compare<less_equal, Scalars>},
    {"gt", choose_compare<more, Scalars>},
    {"ge", choose_compare<more_equal, Scalars>},
    {"lo", choose_compare<less, Integers>},
    {"ls", choose_compare<less_equal, Integers>},
    {"hi", choose_compare<more, Integers>},
    {"hs", choose_compare<more_equal, Integers>},
    {"equ", choose_compare<equal_or_nan, ScalarFloats>},
    {"neu", choose_compare<differs_or_nan, ScalarFloats>},
    {"ltu", choose_compare<less_or_nan, ScalarFloats>},
    {"leu", choose_compare<less_equal_or_nan, ScalarFloats>},
    {"gtu", choose_compare<more_or_nan, ScalarFloats>},
    {"geu", choose_compare<more_equal_or_nan, ScalarFloats>},
    {"num", choose_compare<are_numbers, ScalarFloats>},
    {"nan", choose_compare<is_any_nan, ScalarFloats>},
};

Instruction of_predicates(Execute execute, Register target, Register a, Register b) {
    Instruction instruction;
    instruction.execute = execute;
    instruction.target = target;
    instruction.source[0] = a;
    instruction.source[1] = b;
    return instruction;
}

// Combines a comparison with another predicate; a second result gets the opposite comparison.
void decode_combined(Decoder & decoder, const Statement & statement, Instruction & instruction,
                     int combination) {
    static constexpr Execute COMBINE[] = {elementwise<conjunction, u8, u8, u8>,
                                          elementwise<disjunction, u8, u8, u8>,
                                          elementwise<difference, u8, u8, u8>};
    require(instruction.second == NO_REGISTER || statement.guard.empty(),
            "a guard of a comparison with two results");
    const Register target = instruction.target, compared = decoder.temporary(1);
    instruction.target = compared;
    decoder.emit(instruction);
    Register other = NO_REGISTER;
    if (combination >= 0) {
        bool negated = false;
        other = decoder.predicate(statement.operand(3), negated);
        // The copy keeps the operand, which may be a result too.
        const Execute copy = negated ? elementwise<opposite, u8, u8> : elementwise<same, u8, u8>;
        const Register kept = decoder.temporary(1);
        decoder.emit(of_predicates(copy, kept, other, NO_REGISTER));
        other = kept;
    }
    const Register second = instruction.second;
    if (second != NO_REGISTER) {
        const Register reversed = combination >= 0 ? decoder.temporary(1) : second;
        decoder.emit(of_predicates(elementwise<opposite, u8, u8>, reversed, compared, NO_REGISTER));
        if (combination >= 0) {
            decoder.emit(of_predicates(COMBINE[combination], second, reversed, other));
        }
    }
    instruction = combination >= 0
                      ? of_predicates(COMBINE[combination], target, compared, other)
                      : of_predicates(elementwise<same, u8, u8>, target, compared, NO_REGISTER);
}

void decode_compare(Decoder & decoder, const Statement & statement, Instruction & instruction) {
    const Type type = statement.type();
    for (const Row & row : ROWS) {
        if (instruction.execute == nullptr && statement.has(row.name)) {
            instruction.execute = row.choose(type);
        }
    }
    require(instruction.execute != nullptr, "unknown comparison");
    decoder.write_both(statement.operand(0), 1, instruction);
    instruction.source[0] = decoder.read(statement.operand(1), bytes_of(type));
    instruction.source[1] = decoder.read(statement.operand(2), bytes_of(type));
    const int combination = statement.which({"and", "or", "xor"});
    if (combination >= 0 || instruction.second != NO_REGISTER) {
        decode_combined(decoder, statement, instruction, combination);
    }
}

void decode_select(Decoder & decoder, const Statement & statement, Instruction & instruction) {
    const size_t bytes = bytes_of(statement.type());
    decoder.operands(statement, instruction, bytes, {bytes, bytes, 1});
    instruction.execute = bytes == 2   ? elementwise<select, u16, u16, u16, u8>
                          : bytes == 4 ? elementwise<select, u32, u32, u32, u8>
                          : bytes == 8 ? elementwise<select, u64, u64, u64, u8>
                                       : Execute(nullptr);
}

} // namespace

const std::vector<Operation> COMPARISONS = {{"setp", decode_compare}, {"selp", decode_select}};

} // namespace soft_gpu
