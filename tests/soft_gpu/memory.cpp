// Loads and stores, and conversions of addresses between spaces.
#include "access_counts.h"
#include "decoder.h"
#include "elementwise.h"
#include "memory_check.h"

#include <algorithm>

namespace soft_gpu {

namespace {

// Start of a space for each lane, and the bytes that a lane may use of it.
struct Range {
    u64 base = 0, stride = 0, limit = 0;
};

Range range_of(const Warp & warp, Space space) {
    switch (space) {
    case Space::SHARED:
        return {reinterpret_cast<u64>(warp.shared), 0, warp.shared_bytes};
    case Space::LOCAL:
        return {reinterpret_cast<u64>(warp.local), warp.local_bytes, warp.local_bytes};
    case Space::PARAM:
        return {reinterpret_cast<u64>(warp.parameters), 0, warp.parameter_bytes};
    default:
        return {};
    }
}

template <class Offset>
void add_offset(const Warp & warp, const Address & address, u64 * offsets) {
    const Offset * base = warp.at<Offset>(address.base);
    const auto offset = static_cast<u64>(address.offset);
    for (int lane = 0; lane < N_LANES; ++lane) {
        offsets[lane] = base[lane] + offset;
    }
}

void check_limit(const Warp & warp, const u64 * offsets, u32 bytes, u64 limit) {
    for (int lane = 0; lane < N_LANES; ++lane) {
        require(!warp.is_active(lane) || offsets[lane] + bytes <= limit,
                "address " + std::to_string(offsets[lane]) + " is outside of the " +
                    std::to_string(limit) + " bytes of its space");
    }
}

void look_up(const Warp & warp, const u64 * addresses, u32 bytes) {
    const Range ranges[] = {range_of(warp, Space::SHARED), range_of(warp, Space::PARAM),
                            range_of(warp, Space::LOCAL)};
    for (int lane = 0; lane < N_LANES; ++lane) {
        bool is_allowed = !warp.is_active(lane);
        for (const Range & range : ranges) {
            is_allowed = is_allowed || addresses[lane] - range.base <
                                           std::max(range.limit, range.stride * N_LANES);
        }
        require(is_allowed || is_device_memory(addresses[lane], bytes),
                "an address is not of the GPU");
    }
}

} // namespace

void resolve(const Warp & warp, const Address & address, u32 bytes, u8 ** lanes) {
    u64 offsets[N_LANES];
    if (address.base_bytes == 8) {
        add_offset<u64>(warp, address, offsets);
    } else {
        add_offset<u32>(warp, address, offsets);
    }
    const Range range = range_of(warp, address.space);
    u64 all_bits = 0; // of all offsets
    for_lanes(warp, [&](int lane) { all_bits |= offsets[lane]; });
    if ((all_bits & (bytes - 1)) != 0) {
        throw Error("an address is no multiple of " + std::to_string(bytes));
    }
    // No offset is larger than all bits together, so that most accesses need no look at each.
    if (address.space != Space::GENERIC && all_bits + bytes > range.limit) {
        check_limit(warp, offsets, bytes, range.limit);
    }
    for (int lane = 0; lane < N_LANES; ++lane) {
        lanes[lane] = reinterpret_cast<u8 *>(offsets[lane] + range.base + lane * range.stride);
    }
    if (address.space == Space::GENERIC && is_checking_addresses()) {
        look_up(warp, offsets, bytes);
    }
    if (is_counting() && (address.space == Space::GENERIC || address.space == Space::SHARED)) {
        count_access(warp, lanes, bytes);
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

// Adds the start of a space to addresses, which are those of the host in the generic space.
template <Space SPACE, bool TO_SPACE>
void convert_address(Warp & warp, const Instruction & instruction) {
    u64 * target = warp.at<u64>(instruction.target);
    const u64 * source = warp.at<u64>(instruction.source[0]);
    const Range range = range_of(warp, SPACE);
    for_lanes(warp, [&](int lane) {
        const u64 base = range.base + lane * range.stride;
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
