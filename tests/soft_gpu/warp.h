// A warp: 32 lanes that execute one instruction at a time.
#pragma once

#include "error.h"
#include "instruction.h"

#include <deque>
#include <vector>

namespace soft_gpu {

// Lanes that diverged from the active ones.
struct WaitingLanes {
    u32 pc, lanes;
    bool is_blocked; // until other lanes arrive
};

struct AsyncCopy {
    u8 * to;
    const u8 * from;
    u32 bytes, n_zeros;
    bool ends_group;
};

enum class State : u8 { READY, AT_BARRIER, DONE };

struct Warp {
    u8 * registers = nullptr;
    u32 active = 0, alive = 0, pc = 0;
    State state = State::READY;
    std::vector<WaitingLanes> waiting;
    u8 *shared = nullptr, *local = nullptr, *parameters = nullptr;
    u32 shared_bytes = 0, local_bytes = 0, parameter_bytes = 0; // local_bytes: of a lane
    const Instruction * barrier = nullptr;
    u64 n_jumps_back = 0;
    std::deque<AsyncCopy> copies;

    template <class T>
    T * at(Register offset) const {
        return reinterpret_cast<T *>(registers + offset);
    }
    bool is_active(int lane) const { return (active >> lane & 1) != 0; }
};

// Calls body(lane) for the active lanes, whose registers are independent of each other's.
template <class Body>
__attribute__((always_inline)) inline void for_lanes(const Warp & warp, Body && body) {
    if (warp.active == ALL_LANES) {
#pragma GCC ivdep
        for (int lane = 0; lane < N_LANES; ++lane) {
            body(lane);
        }
        return;
    }
    const u32 active = warp.active;
    for (int lane = 0; lane < N_LANES; ++lane) {
        if ((active >> lane & 1) != 0) {
            body(lane);
        }
    }
}

// Returns the lanes whose predicate is set.
inline u32 lanes_with(const Warp & warp, Register predicate, bool negated = false) {
    u32 lanes = 0;
    for (int part = 0; part < 4; ++part) {
        const u64 bits = warp.at<u64>(predicate)[part] & 0x0101010101010101;
        lanes |= static_cast<u32>(bits * 0x0102040810204080 >> 56) << 8 * part;
    }
    return negated ? ~lanes : lanes;
}

// Computes the addresses of the active lanes, and checks those outside of the generic space.
void resolve(const Warp & warp, const Address & address, u32 bytes, u8 ** lanes);

// Executes until a barrier, the end, or max_jumps jumps back.
void run(const Kernel & kernel, Warp & warp, u32 max_jumps);

} // namespace soft_gpu
