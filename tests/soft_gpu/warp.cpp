// Divergence: the lanes at the lowest address run first, and join others that wait there.
#include "warp.h"
#include "crash.h"

#include <algorithm>

namespace soft_gpu {

namespace {

[[noreturn]] void stop(const Kernel & kernel, u32 pc, const char * why) {
    throw Error(kernel.name + ": " + why + ": " + kernel.texts[pc]);
}

// Goes on with the waiting lanes of the lowest address. False if all are blocked.
bool resume(Warp & warp) {
    WaitingLanes * best = nullptr;
    for (WaitingLanes & lanes : warp.waiting) {
        if (!lanes.is_blocked && (best == nullptr || lanes.pc < best->pc)) {
            best = &lanes;
        }
    }
    if (best == nullptr) {
        return false;
    }
    warp.pc = best->pc;
    warp.active = 0;
    const auto joins = [&](const WaitingLanes & lanes) {
        warp.active |= lanes.pc == warp.pc ? lanes.lanes : 0;
        return lanes.pc == warp.pc;
    };
    warp.waiting.erase(std::remove_if(warp.waiting.begin(), warp.waiting.end(), joins),
                       warp.waiting.end());
    return true;
}

void reconverge(Warp & warp) {
    const auto is_next = [&](const WaitingLanes & lanes) {
        return lanes.pc == warp.pc || (!lanes.is_blocked && lanes.pc < warp.pc);
    };
    if (std::any_of(warp.waiting.begin(), warp.waiting.end(), is_next)) {
        warp.waiting.push_back({warp.pc, warp.active, false});
        resume(warp);
    }
}

// Lets the active lanes wait for others at their address.
void block(const Kernel & kernel, Warp & warp) {
    const u32 pc = warp.pc;
    warp.waiting.push_back({pc, warp.active, true});
    if (!resume(warp)) {
        stop(kernel, pc, "lanes wait for others that never arrive");
    }
}

u32 guarded(const Warp & warp, const Instruction & instruction) {
    return instruction.guard == NO_REGISTER
               ? warp.active
               : warp.active & lanes_with(warp, instruction.guard, instruction.guard_negated);
}

void execute(Warp & warp, const Instruction & instruction, u32 lanes) {
    if (lanes != 0) {
        const u32 active = warp.active;
        warp.active = lanes;
        instruction.execute(warp, instruction);
        warp.active = active;
    }
    ++warp.pc;
}

void jump(Warp & warp, const Instruction & instruction, u32 lanes) {
    const u32 next = warp.pc + 1;
    warp.n_jumps_back += lanes != 0 && instruction.jump <= warp.pc;
    if (lanes == warp.active) {
        warp.pc = instruction.jump;
        return;
    }
    if (lanes != 0) {
        warp.waiting.push_back({instruction.jump, lanes, false});
        warp.active &= ~lanes;
    }
    warp.pc = next;
}

void end_lanes(const Kernel & kernel, Warp & warp, u32 lanes) {
    warp.alive &= ~lanes;
    warp.active &= ~lanes;
    if (warp.active != 0) {
        ++warp.pc;
        return;
    }
    if (warp.alive == 0) {
        warp.state = State::DONE;
        return;
    }
    // Those that waited for the lanes that ended need them no more.
    for (WaitingLanes & waiting : warp.waiting) {
        waiting.is_blocked = false;
    }
    if (!resume(warp)) {
        stop(kernel, warp.pc, "lanes are lost");
    }
}

void converge(const Kernel & kernel, Warp & warp, const Instruction & instruction, u32 lanes) {
    const u32 * members = warp.at<u32>(instruction.members);
    u32 expected = 0;
    for (int lane = 0; lane < N_LANES; ++lane) {
        expected |= warp.is_active(lane) ? members[lane] : 0;
    }
    if ((expected & warp.alive & ~warp.active) != 0) {
        block(kernel, warp);
    } else {
        execute(warp, instruction, lanes);
    }
}

void wait_at_barrier(const Kernel & kernel, Warp & warp, const Instruction & instruction,
                     u32 lanes) {
    if (lanes == 0) {
        ++warp.pc;
    } else if (warp.active != warp.alive) {
        block(kernel, warp);
    } else {
        warp.barrier = &instruction;
        warp.state = State::AT_BARRIER;
        ++warp.pc;
    }
}

} // namespace

void run(const Kernel & kernel, Warp & warp, u32 max_jumps) {
    running_warp = &warp;
    const u64 last_jump = warp.n_jumps_back + max_jumps;
    try {
        while (warp.state == State::READY && warp.n_jumps_back < last_jump) {
            if (!warp.waiting.empty()) {
                reconverge(warp);
            }
            const Instruction & instruction = kernel.code[warp.pc];
            const u32 lanes = guarded(warp, instruction);
            switch (instruction.flow) {
            case Flow::NEXT:
                execute(warp, instruction, lanes);
                break;
            case Flow::BRANCH:
                jump(warp, instruction, lanes);
                break;
            case Flow::CONVERGE:
                converge(kernel, warp, instruction, lanes);
                break;
            case Flow::BARRIER:
                wait_at_barrier(kernel, warp, instruction, lanes);
                break;
            case Flow::EXIT:
                end_lanes(kernel, warp, lanes);
                break;
            case Flow::TRAP:
                if (lanes != 0) {
                    throw Error("a trap, or an instruction that is not known");
                }
                ++warp.pc;
            }
        }
    } catch (const Error & error) {
        if (std::string(error.what()).find(kernel.name + ": ") == 0) {
            throw;
        }
        stop(kernel, warp.pc, error.what());
    }
}

} // namespace soft_gpu
