// Control flow, barriers, and instructions that change nothing in this order of execution.
#include "decoder.h"
#include "warp.h"

namespace soft_gpu {

namespace {

void do_nothing(Warp &, const Instruction &) {}

void decode_branch(Decoder & decoder, const Statement & statement, Instruction & instruction) {
    instruction.flow = Flow::BRANCH;
    decoder.jump_to(statement.operand(0));
}

void decode_exit(Decoder &, const Statement &, Instruction & instruction) {
    instruction.flow = Flow::EXIT;
}

void decode_trap(Decoder &, const Statement &, Instruction & instruction) {
    instruction.flow = Flow::TRAP;
}

void decode_nothing(Decoder &, const Statement & statement, Instruction & instruction) {
    for (const std::string & modifier : statement.modifiers) {
        statement.has(modifier);
    }
    instruction.execute = do_nothing;
}

// Operands: [result,] number of the barrier [, threads] [, predicate].
void decode_barrier(Decoder & decoder, const Statement & statement, Instruction & instruction) {
    statement.has("cta");
    if (statement.has("warp")) {
        instruction.flow = Flow::CONVERGE;
        instruction.members = decoder.read(statement.operand(0), 4);
        instruction.execute = do_nothing;
        return;
    }
    require(statement.has("sync") || statement.has("red"), "unknown barrier");
    instruction.flow = Flow::BARRIER;
    std::vector<std::string> operands = statement.operands;
    const int reduction = statement.which({"and", "or", "popc"});
    if (reduction >= 0) {
        require(operands.size() >= 3, "operands are missing");
        instruction.mode = static_cast<u8>(reduction + 1);
        instruction.target = decoder.write(operands.front(), reduction == 2 ? 4 : 1);
        instruction.source[2] = decoder.predicate(operands.back(), instruction.flag);
        operands.erase(operands.begin());
        operands.pop_back();
    }
    require(!operands.empty(), "operands are missing");
    instruction.source[0] = decoder.read(operands[0], 4);
    instruction.source[1] = operands.size() > 1 ? decoder.read(operands[1], 4) : NO_REGISTER;
}

} // namespace

const std::vector<Operation> CONTROL = {
    {"bra", decode_branch},
    {"ret", decode_exit},
    {"exit", decode_exit},
    {"trap", decode_trap},
    {"bar", decode_barrier},
    {"barrier", decode_barrier},
    {"membar", decode_nothing},
    {"fence", decode_nothing},
    {"prefetch", decode_nothing},
    {"prefetchu", decode_nothing},
    {"nanosleep", decode_nothing},
    {"discard", decode_nothing},
    {"griddepcontrol", decode_nothing},
    {"applypriority", decode_nothing},
};

} // namespace soft_gpu
