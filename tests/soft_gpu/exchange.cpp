// Exchanges between the lanes of a warp: shuffles, votes, matches and reductions.
#include "decoder.h"
#include "warp.h"

#include <algorithm>

namespace soft_gpu {

namespace {

enum Shuffle : u8 { UP, DOWN, BUTTERFLY, INDEX };

// Finds the source of a lane. is_inside: out, false if it lies outside of the lane's segment, where
// the lane keeps its own value.
int shuffle_source(u8 mode, int lane, u32 operand, u32 bounds, bool & is_inside) {
    const int distance = static_cast<int>(operand & 31), clamp = static_cast<int>(bounds & 31);
    const int segment = static_cast<int>(bounds >> 8 & 31);
    const int first = lane & segment, last = first | (clamp & ~segment);
    const int source = mode == UP          ? lane - distance
                       : mode == DOWN      ? lane + distance
                       : mode == BUTTERFLY ? lane ^ distance
                                           : first | (distance & ~segment);
    is_inside = mode == UP ? source >= last : source <= last;
    return is_inside ? source : lane;
}

void shuffle(Warp & warp, const Instruction & instruction) {
    u32 values[N_LANES];
    std::memcpy(values, warp.at<u32>(instruction.source[0]), sizeof(values));
    u32 operands[N_LANES], bounds[N_LANES];
    std::memcpy(operands, warp.at<u32>(instruction.source[1]), sizeof(operands));
    std::memcpy(bounds, warp.at<u32>(instruction.source[2]), sizeof(bounds));
    u32 * target = warp.at<u32>(instruction.target);
    u8 * inside = instruction.second == NO_REGISTER ? nullptr : warp.at<u8>(instruction.second);
    for_lanes(warp, [&](int lane) {
        bool is_inside = false;
        const int source =
            shuffle_source(instruction.mode, lane, operands[lane], bounds[lane], is_inside);
        // The value of a lane that does not take part is undefined: NaN.
        target[lane] = warp.is_active(source & 31) ? values[source & 31] : ~0u;
        if (inside != nullptr) {
            inside[lane] = is_inside;
        }
    });
}

// Calls body(group) for the groups of active lanes that name the same members.
template <class Body>
void for_groups(const Warp & warp, const Instruction & instruction, Body && body) {
    const u32 * members = warp.at<u32>(instruction.members);
    for (u32 left = warp.active; left != 0;) {
        const int first = __builtin_ctz(left);
        u32 group = 0;
        for (int lane = first; lane < N_LANES; ++lane) {
            if ((left >> lane & 1) != 0 && members[lane] == members[first]) {
                group |= 1u << lane;
            }
        }
        body(group);
        left &= ~group;
    }
}

template <class Body>
void for_each_lane(u32 lanes, Body && body) {
    for (; lanes != 0; lanes &= lanes - 1) {
        body(__builtin_ctz(lanes));
    }
}

enum Vote : u8 { BALLOT, ALL, ANY, UNANIMOUS };

void vote(Warp & warp, const Instruction & instruction) {
    const u32 votes = lanes_with(warp, instruction.source[0], instruction.flag);
    for_groups(warp, instruction, [&](u32 group) {
        const u32 yes = votes & group;
        const bool is_all = yes == group, is_none = yes == 0;
        const bool result = instruction.mode == ALL   ? is_all
                            : instruction.mode == ANY ? !is_none
                                                      : is_all || is_none;
        for_each_lane(group, [&](int lane) {
            if (instruction.mode == BALLOT) {
                warp.at<u32>(instruction.target)[lane] = yes;
            } else {
                warp.at<u8>(instruction.target)[lane] = result;
            }
        });
    });
}

template <class T>
void match_any(Warp & warp, const Instruction & instruction) {
    T values[N_LANES];
    std::memcpy(values, warp.at<T>(instruction.source[0]), sizeof(values));
    for_groups(warp, instruction, [&](u32 group) {
        for_each_lane(group, [&](int lane) {
            u32 equal = 0;
            for_each_lane(group,
                          [&](int other) { equal |= (values[other] == values[lane]) << other; });
            warp.at<u32>(instruction.target)[lane] = equal;
        });
    });
}

enum Reduction : u8 { SUM, LEAST, MOST, AND, OR, XOR };

template <class T>
void reduce(Warp & warp, const Instruction & instruction) {
    const T * values = warp.at<T>(instruction.source[0]);
    for_groups(warp, instruction, [&](u32 group) {
        T result = values[__builtin_ctz(group)];
        for_each_lane(group & (group - 1), [&](int lane) {
            const T value = values[lane];
            switch (instruction.mode) {
            case SUM:
                result += value;
                break;
            case LEAST:
                result = std::min(result, value);
                break;
            case MOST:
                result = std::max(result, value);
                break;
            case AND:
                result &= value;
                break;
            case OR:
                result |= value;
                break;
            default:
                result ^= value;
            }
        });
        for_each_lane(group, [&](int lane) { warp.at<T>(instruction.target)[lane] = result; });
    });
}

void active_mask(Warp & warp, const Instruction & instruction) {
    u32 * target = warp.at<u32>(instruction.target);
    for_lanes(warp, [&](int lane) { target[lane] = warp.active; });
}

// Reads the mask of the lanes that take part, the last operand.
void read_members(Decoder & decoder, const Statement & statement, Instruction & instruction) {
    require(statement.has("sync"), "members are missing");
    instruction.flow = Flow::CONVERGE;
    instruction.members = decoder.read(statement.operand(statement.operands.size() - 1), 4);
}

void decode_shuffle(Decoder & decoder, const Statement & statement, Instruction & instruction) {
    read_members(decoder, statement, instruction);
    require(bytes_of(statement.type()) == 4, "unknown type");
    decoder.write_both(statement.operand(0), 4, instruction);
    for (size_t i = 0; i < 3; ++i) {
        instruction.source[i] = decoder.read(statement.operand(i + 1), 4);
    }
    const int mode = statement.which({"up", "down", "bfly", "idx"});
    require(mode >= 0 && statement.operands.size() == 5, "unknown shuffle");
    instruction.mode = static_cast<u8>(mode);
    instruction.execute = shuffle;
}

void decode_vote(Decoder & decoder, const Statement & statement, Instruction & instruction) {
    read_members(decoder, statement, instruction);
    const int mode = statement.which({"ballot", "all", "any", "uni"});
    require(mode >= 0 && statement.operands.size() == 3, "unknown vote");
    instruction.mode = static_cast<u8>(mode);
    instruction.target = decoder.write(statement.operand(0), mode == BALLOT ? 4 : 1);
    instruction.source[0] = decoder.predicate(statement.operand(1), instruction.flag);
    instruction.execute = vote;
}

void decode_match(Decoder & decoder, const Statement & statement, Instruction & instruction) {
    read_members(decoder, statement, instruction);
    require(statement.has("any"), "unknown match");
    const size_t bytes = bytes_of(statement.type());
    instruction.target = decoder.write(statement.operand(0), 4);
    instruction.source[0] = decoder.read(statement.operand(1), bytes);
    instruction.execute = bytes == 4 ? match_any<u32> : bytes == 8 ? match_any<u64> : nullptr;
}

void decode_reduce(Decoder & decoder, const Statement & statement, Instruction & instruction) {
    read_members(decoder, statement, instruction);
    const Type type = statement.type();
    const int mode = statement.which({"add", "min", "max", "and", "or", "xor"});
    require(mode >= 0 && (type == Type::U32 || type == Type::S32), "unknown reduction");
    instruction.mode = static_cast<u8>(mode);
    instruction.target = decoder.write(statement.operand(0), 4);
    instruction.source[0] = decoder.read(statement.operand(1), 4);
    instruction.execute = type == Type::S32 ? reduce<s32> : reduce<u32>;
}

void decode_active_mask(Decoder & decoder, const Statement & statement, Instruction & instruction) {
    instruction.target = decoder.write(statement.operand(0), 4);
    instruction.execute = active_mask;
}

} // namespace

const std::vector<Operation> EXCHANGES = {{"shfl", decode_shuffle},
                                          {"vote", decode_vote},
                                          {"match", decode_match},
                                          {"redux", decode_reduce},
                                          {"activemask", decode_active_mask}};

} // namespace soft_gpu
