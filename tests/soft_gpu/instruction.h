// Decoded instructions, and the kernel that they make up.
#pragma once

#include "types.h"

#include <string>
#include <vector>

namespace soft_gpu {

struct Warp;
struct Instruction;
using Execute = void (*)(Warp &, const Instruction &);

// Offset of a register in the register file of a warp: 32 values, one a lane.
using Register = u32;
constexpr Register NO_REGISTER = ~0u;
constexpr int N_LANES = 32;
constexpr u32 ALL_LANES = ~0u;

enum class Space : u8 { GENERIC, SHARED, LOCAL, PARAM };

// A memory operand: register plus constant offset.
struct Address {
    Register base = NO_REGISTER;
    u8 base_bytes = 8;
    Space space = Space::GENERIC;
    s64 offset = 0;
};

// Decides what the warp does after, or instead of, `execute`.
enum class Flow : u8 { NEXT, BRANCH, EXIT, BARRIER, CONVERGE, TRAP };

struct Instruction {
    Execute execute = nullptr;
    Flow flow = Flow::NEXT;
    bool guard_negated = false;
    bool flag = false;             // by instruction: transposed, negated predicate
    u8 mode = 0;                   // by instruction: kind of exchange, reduction, rounding
    u8 count = 1;                  // elements of a vector, matrices, bytes of an asynchronous copy
    Register guard = NO_REGISTER;  // predicate
    Register target = NO_REGISTER; // result
    Register second = NO_REGISTER; // predicate that is a second result
    Register source[5] = {NO_REGISTER, NO_REGISTER, NO_REGISTER, NO_REGISTER, NO_REGISTER};
    Register members = NO_REGISTER; // mask of the lanes that must arrive (Flow::CONVERGE)
    Address address, from;          // from: source of an asynchronous copy
    u32 jump = 0;
    u32 rows = 0, depth = 0; // shape of a matrix product
    Register list[16] = {};  // elements of vectors and fragments
};

struct Parameter {
    u32 offset, bytes;
};

struct Kernel {
    std::string name;
    std::vector<Instruction> code;
    std::vector<std::string> texts; // of each instruction, with the reason if it is unknown
    std::vector<u8> registers;      // initial register file of a warp, with constants
    std::vector<Parameter> parameters;
    u32 parameter_bytes = 0, shared_bytes = 0, local_bytes = 0;
    u32 max_threads = 0;            // of a block; 0: no limit of its own
    bool flushes_denormals = false; // some instruction has .ftz
};

} // namespace soft_gpu
