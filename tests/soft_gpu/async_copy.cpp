// cp.async: copies to shared memory that are made at their wait, so that a missing wait is seen.
#include "decoder.h"
#include "warp.h"

#include <algorithm>

namespace soft_gpu {

namespace {

void start_copy(Warp & warp, const Instruction & instruction) {
    u8 *to[N_LANES], *from[N_LANES];
    resolve(warp, instruction.address, instruction.count, to);
    resolve(warp, instruction.from, instruction.count, from);
    const bool has_size = instruction.source[0] != NO_REGISTER;
    for (int lane = 0; lane < N_LANES; ++lane) {
        if (warp.is_active(lane)) {
            const u32 size =
                has_size ? warp.at<u32>(instruction.source[0])[lane] : instruction.count;
            require(size <= instruction.count, "more bytes than the copy has");
            std::memset(to[lane], 0xff, instruction.count);
            warp.copies.push_back({to[lane], from[lane], size, instruction.count - size, false});
        }
    }
}

void end_group(Warp & warp, const Instruction &) {
    warp.copies.push_back({nullptr, nullptr, 0, 0, true});
}

void finish_oldest(Warp & warp) {
    const AsyncCopy & copy = warp.copies.front();
    if (!copy.ends_group) {
        std::memcpy(copy.to, copy.from, copy.bytes);
        std::memset(copy.to + copy.bytes, 0, copy.n_zeros);
    }
    warp.copies.pop_front();
}

// Leaves the newest groups, as many as the operand says, and what was not committed.
void wait_for_groups(Warp & warp, const Instruction & instruction) {
    auto n_groups = std::count_if(warp.copies.begin(), warp.copies.end(),
                                  [](const AsyncCopy & copy) { return copy.ends_group; });
    while (n_groups > static_cast<s64>(instruction.depth)) {
        n_groups -= warp.copies.front().ends_group;
        finish_oldest(warp);
    }
}

void wait_for_all(Warp & warp, const Instruction &) {
    while (!warp.copies.empty()) {
        finish_oldest(warp);
    }
}

void decode_copy(Decoder & decoder, const Statement & statement, Instruction & instruction) {
    require(statement.has("async"), "unknown modifier");
    if (statement.has("commit_group")) {
        instruction.execute = end_group;
    } else if (statement.has("wait_group")) {
        instruction.execute = wait_for_groups;
        instruction.depth = static_cast<u32>(decoder.number(statement.operand(0)));
    } else if (statement.has("wait_all")) {
        instruction.execute = wait_for_all;
    } else {
        require(statement.has("shared") || statement.has("shared::cta"), "unknown space");
        const size_t n = statement.operands.size();
        require(n == 3 || n == 4, "3 or 4 operands are expected");
        instruction.execute = start_copy;
        instruction.address = decoder.address(statement.operand(0), Space::SHARED);
        instruction.from = decoder.address(statement.operand(1), Space::GENERIC);
        instruction.count = static_cast<u8>(decoder.number(statement.operand(2)));
        require(instruction.count == 4 || instruction.count == 8 || instruction.count == 16,
                "4, 8 or 16 bytes are expected");
        if (n == 4) {
            instruction.source[0] = decoder.read(statement.operand(3), 4);
        }
    }
}

} // namespace

const std::vector<Operation> ASYNC_COPIES = {{"cp", decode_copy}};

} // namespace soft_gpu
