// Decodes a kernel: assigns registers and constants, and finds the code of each instruction.
#pragma once

#include "instruction.h"
#include "text.h"

#include <map>
#include <string>
#include <unordered_map>
#include <vector>

namespace soft_gpu {

// Addresses of variables by name: of the host in global memory, offsets in the other spaces.
using Symbols = std::unordered_map<std::string, u64>;

struct Variables {
    Symbols symbols;
    u32 shared_bytes = 0;
    std::vector<Declaration> dynamic; // extern shared arrays, behind all others
};

class Decoder;
using Decode = void (*)(Decoder &, const Statement &, Instruction &);

class Decoder {
  public:
    // parameters and body: the text between the kernel's brackets.
    Decoder(Kernel & kernel, const Variables & variables, const std::string & parameters,
            const std::string & body);

    // Returns an operand's register: a named one, a constant's, or NO_REGISTER for "_".
    // found_bytes: out, size of the register; without it, another size than `bytes` is an error.
    Register read(const std::string & operand, size_t bytes, size_t * found_bytes = nullptr);
    // Returns the register of a result.
    Register write(const std::string & operand, size_t bytes, size_t * found_bytes = nullptr);
    // Returns a predicate's register. negated: out, of an operand like !%p1.
    Register predicate(const std::string & operand, bool & negated);
    // Splits results like %r1|%p1 into a register and a predicate, which may be missing.
    void write_both(const std::string & operand, size_t bytes, Instruction & instruction);
    Address address(const std::string & operand, Space space);
    // Reads {a, b, ...} or a single operand. Returns the number of elements.
    size_t list(const std::string & operand, size_t bytes, Register * registers,
                size_t * found_bytes = nullptr);
    Register temporary(size_t bytes) { return allocate(bytes, 0xff); }
    Register constant(size_t bytes, u64 value);
    // Reads the result and the sources of an elementwise instruction.
    void operands(const Statement & statement, Instruction & instruction, size_t target_bytes,
                  const std::vector<size_t> & source_bytes);
    // Returns an operand that must be a number.
    u64 number(const std::string & operand) const;
    // Adds an instruction before the one that is decoded, under its guard.
    void emit(const Instruction & instruction);
    void jump_to(const std::string & label) { jumps_.push_back({kernel_.code.size(), label}); }
    void flush_denormals() { kernel_.flushes_denormals = true; }

  private:
    struct Named {
        Register at;
        size_t bytes;
    };
    Register allocate(size_t bytes, u8 fill);
    void declare(const std::string & text);
    void declare_registers(const std::string & text);
    void declare_parameters(const std::string & text);
    void lay_out_shared(const std::string & body, const Variables & variables);
    void decode_body(const std::string & text);
    void decode_statement(const std::string & text);
    void resolve_jumps();
    const Named * find(const std::string & name) const;
    bool value_of(const std::string & operand, u64 & value) const;

    Kernel & kernel_;
    const Symbols & globals_;
    Symbols symbols_; // of the kernel
    std::vector<std::unordered_map<std::string, Named>> scopes_{1};
    std::map<std::pair<size_t, u64>, Register> constants_;
    std::vector<std::pair<size_t, std::string>> jumps_;
    std::unordered_map<std::string, u32> labels_;
    Instruction current_;
    std::string current_text_;
};

// Operations by mnemonic, in a file each.
struct Operation {
    const char * mnemonic;
    Decode decode;
};
extern const std::vector<Operation> ARITHMETIC, BITS, COMPARISONS, CONVERSIONS, MEMORY, ATOMICS,
    ASYNC_COPIES, EXCHANGES, MATRICES, CONTROL;

} // namespace soft_gpu
