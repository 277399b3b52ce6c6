// Loads and stores, and conversions of addresses between spaces.
#include "decoder.h"
#include "elementwise.h"
#include "memory_check.h"

#include <algorithm>

namespace soft_gpu {

void resolve(const Warp & warp, const Address & address, u32 bytes, u8 ** lanes) {
    u64 offsets[N_LANES];
    for (int lane = 0; lane < N_LANES; ++lane) {
        offsets[lane] = (address.base_bytes == 8 ? warp.at<u64>(address.base)[lane]
                                                 : warp.at<u32>(address.base)[lane]) +
                        static_cast<u64>(address.offset);
    }
    u64 base = 0, stride = 0, limit = 0;
    if (address.space == Space::SHARED) {
        base = reinterpret_cast<u64>(warp.shared);
        limit = warp.shared_bytes;
    } else if (address.space == Space::LOCAL) {
        base = reinterpret_cast<u64>(warp.local);
        stride = limit = warp.local_bytes;
    } else if (address.space == Space::PARAM) {
        base = reinterpret_cast<u64>(warp.parameters);
        limit = warp.parameter_bytes;
    }
    u64 farthest = 0, misaligned = 0;
    for (int lane = 0; lane < N_LANES; ++lane) {
        const u64 used = warp.is_active(lane) ? offsets[lane] : 0;
        farthest = std::max(farthest, used);
        misaligned |= used & (bytes - 1);
        lanes[lane] = reinterpret_cast<u8 *>(offsets[lane] + base + lane * stride);
    }
    require(misaligned == 0, "an address is no multiple of " + std::to_string(bytes));
    if (address.space != Space::GENERIC) {
        require(farthest + bytes <= limit, "address " + std::to_string(farthest) +
                                               " is outside of the " + std::to_string(limit) +
                                               " bytes of its space");
    } else if (is_checking_addresses()) {
        for (int lane = 0; lane < N_LANES; ++lane) {
            const auto at = reinterpret_cast<u64>(lanes[lane]);
            const bool is_own =
                at - reinterpret_cast<u64>(warp.shared) < warp.shared_bytes ||
                at - reinterpret_cast<u64>(warp.parameters) < warp.parameter_bytes ||
                at - reinterpret_cast<u64>(warp.local) <
                    static_cast<u64>(N_LANES) * warp.local_bytes;
            require(!warp.is_active(lane) || is_own || is_device_memory(at, bytes),
                    "an address is not of the GPU");
        }
    }
}

namespace {

template <class Value, class Held>
void load(Warp & warp, const Instruction & instruction) {
    u8 * lanes[N_LANES];
    resolve(warp, instruction.address, sizeof(Value) * instruction.count, lanes);
    for (int i = 0; i < instruction.count; ++i) {
        if (instruction.list[i] != NO_REGISTER) {
            Held * target = warp.at<Held>(instruction.list[i]);
            for_lanes(warp, [&](int lane) {
                target[lane] = static_cast<Held>(reinterpret_cast<const Value *>(lanes[lane])[i]);
            });
        }
    }
}

template <class Value, class Held>
void store(Warp & warp, const Instruction & instruction) {
    u8 * lanes[N_LANES];
    resolve(warp, instruction.address, sizeof(Value) * instruction.count, lanes);
    for (int i = 0; i < instruction.count; ++i) {
        const Held * source = warp.at<Held>(instruction.list[i]);
        for_lanes(warp, [&](int lane) {
            reinterpret_cast<Value *>(lanes[lane])[i] = static_cast<Value>(source[lane]);
        });
    }
}

// Registers may be wider than the value: a signed one is extended by its sign.
template <class Value>
Execute access(bool is_store, size_t held) {
    constexpr bool SIGNED = std::is_signed_v<Value>;
    using Held16 = std::conditional_t<SIGNED, s16, u16>;
    using Held32 = std::conditional_t<SIGNED, s32, u32>;
    using Held64 = std::conditional_t<SIGNED, s64, u64>;
    if (held < sizeof(Value)) {
        return nullptr;
    }
    return held == 2   ? (is_store ? store<Value, Held16> : load<Value, Held16>)
           : held == 4 ? (is_store ? store<Value, Held32> : load<Value, Held32>)
           : held == 8 ? (is_store ? store<Value, Held64> : load<Value, Held64>)
                       : Execute(nullptr);
}

Execute access(Type type, bool is_store, size_t held) {
    switch (type) {
    case Type::U8:
        return access<u8>(is_store, held);
    case Type::S8:
        return access<s8>(is_store, held);
    case Type::S16:
        return access<s16>(is_store, held);
    case Type::S32:
        return access<s32>(is_store, held);
    default:
        break;
    }
    const size_t bytes = bytes_of(type);
    return bytes == 2   ? access<u16>(is_store, held)
           : bytes == 4 ? access<u32>(is_store, held)
           : bytes == 8 ? access<u64>(is_store, held)
                        : nullptr;
}

Space space_of(const Statement & statement) {
    return statement.has("shared")  ? Space::SHARED
           : statement.has("local") ? Space::LOCAL
           : statement.has("param") ? Space::PARAM
                                    : Space::GENERIC;
}

void decode_access(Decoder & decoder, const Statement & statement, Instruction & instruction) {
    const bool is_store = statement.mnemonic == "st";
    const Type type = statement.type();
    const int vector = statement.which({"v2", "v4"});
    const std::string & values = statement.operand(is_store ? 1 : 0);
    size_t held = bytes_of(type);
    instruction.address = decoder.address(statement.operand(is_store ? 0 : 1), space_of(statement));
    instruction.count =
        static_cast<u8>(decoder.list(values, bytes_of(type), instruction.list, &held));
    require(instruction.count == (vector < 0 ? 1 : vector == 0 ? 2 : 4), "elements are missing");
    require(type != Type::PRED, "unknown type");
    instruction.execute = access(type, is_store, held);
}

// Generic addresses are those of the host; in the other spaces, offsets.
u64 base_of(const Warp & warp, Space space, int lane) {
    return space == Space::SHARED ? reinterpret_cast<u64>(warp.shared)
           : space == Space::PARAM
               ? reinterpret_cast<u64>(warp.parameters)
               : reinterpret_cast<u64>(warp.local) + static_cast<u64>(lane) * warp.local_bytes;
}

template <Space SPACE, bool TO_SPACE>
void convert_address(Warp & warp, const Instruction & instruction) {
    u64 * target = warp.at<u64>(instruction.target);
    const u64 * source = warp.at<u64>(instruction.source[0]);
    for_lanes(warp, [&](int lane) {
        const u64 base = base_of(warp, SPACE, lane);
        target[lane] = source[lane] + (TO_SPACE ? 0 - base : base);
    });
}

constexpr auto same = [](u64 address) { return address; };

void decode_address(Decoder & decoder, const Statement & statement, Instruction & instruction) {
    const bool to_space = statement.has("to");
    const Space space = space_of(statement);
    decoder.operands(statement, instruction, 8, {8});
    instruction.execute =
        space == Space::SHARED  ? (to_space ? convert_address<Space::SHARED, true>
                                            : convert_address<Space::SHARED, false>)
        : space == Space::LOCAL ? (to_space ? convert_address<Space::LOCAL, true>
                                            : convert_address<Space::LOCAL, false>)
        : space == Space::PARAM ? (to_space ? convert_address<Space::PARAM, true>
                                            : convert_address<Space::PARAM, false>)
                                : elementwise<same, u64, u64>;
}

void test_space(Warp & warp, const Instruction & instruction) {
    u8 * target = warp.at<u8>(instruction.target);
    const u64 * source = warp.at<u64>(instruction.source[0]);
    const auto space = static_cast<Space>(instruction.mode);
    for_lanes(warp, [&](int lane) {
        const u64 at = source[lane];
        const bool is_shared = at - reinterpret_cast<u64>(warp.shared) < warp.shared_bytes;
        const bool is_local =
            at - reinterpret_cast<u64>(warp.local) < static_cast<u64>(N_LANES) * warp.local_bytes;
        target[lane] = space == Space::SHARED  ? is_shared
                       : space == Space::LOCAL ? is_local
                                               : !is_shared && !is_local;
    });
}

void decode_test_space(Decoder & decoder, const Statement & statement, Instruction & instruction) {
    const Space space = space_of(statement);
    instruction.mode = static_cast<u8>(space);
    instruction.execute = space == Space::PARAM ? nullptr : test_space;
    decoder.operands(statement, instruction, 1, {8});
}

} // namespace

const std::vector<Operation> MEMORY = {{"ld", decode_access},
                                       {"ldu", decode_access},
                                       {"st", decode_access},
                                       {"cvta", decode_address},
                                       {"isspacep", decode_test_space}};

} // namespace soft_gpu
