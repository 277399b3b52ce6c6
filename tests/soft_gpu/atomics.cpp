// Atomic operations on memory. Blocks run on several threads, so they are atomic on the host too.
#include "decoder.h"
#include "elementwise.h"

#include <algorithm>

namespace soft_gpu {

namespace {

constexpr auto add = [](auto old, auto b, auto) { return old + b; };
constexpr auto lesser = [](auto old, auto b, auto) { return b < old ? b : old; };
constexpr auto greater = [](auto old, auto b, auto) { return old < b ? b : old; };
constexpr auto conjunction = [](auto old, auto b, auto) { return old & b; };
constexpr auto disjunction = [](auto old, auto b, auto) { return old | b; };
constexpr auto difference = [](auto old, auto b, auto) { return old ^ b; };
constexpr auto exchange = [](auto, auto b, auto) { return b; };
constexpr auto exchange_if_equal = [](auto old, auto b, auto c) { return old == b ? c : old; };
constexpr auto increment = [](auto old, auto b, auto) { return old >= b ? 0 : old + 1; };
constexpr auto decrement = [](auto old, auto b, auto) { return old == 0 || old > b ? b : old - 1; };

template <const auto & OPERATION, class T>
void update(Warp & warp, const Instruction & instruction) {
    using Bits =
        std::conditional_t<sizeof(T) == 2, u16, std::conditional_t<sizeof(T) == 4, u32, u64>>;
    u8 * lanes[N_LANES];
    resolve(warp, instruction.address, sizeof(T), lanes);
    const bool has_target = instruction.target != NO_REGISTER;
    Bits * target = has_target ? warp.at<Bits>(instruction.target) : nullptr;
    const T * b = warp.at<T>(instruction.source[0]);
    const T * c = warp.at<T>(instruction.source[1]);
    for (int lane = 0; lane < N_LANES; ++lane) {
        if (!warp.is_active(lane)) {
            continue;
        }
        auto * at = reinterpret_cast<Bits *>(lanes[lane]);
        Bits old = __atomic_load_n(at, __ATOMIC_SEQ_CST), changed = 0;
        do {
            changed = bit_cast<Bits>(apply<OPERATION, T>(bit_cast<T>(old), b[lane], c[lane]));
        } while (!__atomic_compare_exchange_n(at, &old, changed, false, __ATOMIC_SEQ_CST,
                                              __ATOMIC_SEQ_CST));
        if (has_target) {
            target[lane] = old;
        }
    }
}

template <const auto & OPERATION, class... T>
Execute choose_update(Type type, Types<T...>) {
    Execute found = nullptr;
    ((type == type_of<T>() ? void(found = update<OPERATION, T>) : void()), ...);
    return found;
}
template <const auto & OPERATION, class List>
Execute choose_update(Type type) {
    return choose_update<OPERATION>(type, List());
}

struct Row {
    const char * name;
    size_t n_sources;
    Execute (*choose)(Type);
};
using Ordered = Types<u32, s32, u64, s64>;
const Row ROWS[] = {
    {"add", 1,
     choose_update<add, Types<u32, s32, u64, f16, bf16, f32, f64, Pair<f16>, Pair<bf16>>>},
    {"min", 1, choose_update<lesser, Ordered>},
    {"max", 1, choose_update<greater, Ordered>},
    {"and", 1, choose_update<conjunction, Words>},
    {"or", 1, choose_update<disjunction, Words>},
    {"xor", 1, choose_update<difference, Words>},
    {"exch", 1, choose_update<exchange, Words>},
    {"cas", 2, choose_update<exchange_if_equal, Types<u16, u32, u64>>},
    {"inc", 1, choose_update<increment, Types<u32>>},
    {"dec", 1, choose_update<decrement, Types<u32>>},
};

void decode_update(Decoder & decoder, const Statement & statement, Instruction & instruction) {
    const size_t bytes = bytes_of(statement.type());
    const size_t first = statement.mnemonic == "atom" ? 1 : 0;
    for (const Row & row : ROWS) {
        if (!statement.has(row.name)) {
            continue;
        }
        instruction.execute = row.choose(statement.type());
        require(statement.operands.size() == first + 1 + row.n_sources, "operands are missing");
        const Space space = statement.has("shared") ? Space::SHARED : Space::GENERIC;
        instruction.address = decoder.address(statement.operand(first), space);
        for (size_t i = 0; i < 2; ++i) { // operations with one source get it twice
            const size_t operand = first + 1 + std::min(i, row.n_sources - 1);
            instruction.source[i] = decoder.read(statement.operand(operand), bytes);
        }
        instruction.target = first == 1 ? decoder.write(statement.operand(0), bytes) : NO_REGISTER;
    }
}

} // namespace

const std::vector<Operation> ATOMICS = {{"atom", decode_update}, {"red", decode_update}};

} // namespace soft_gpu
