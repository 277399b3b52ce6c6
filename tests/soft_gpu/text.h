// Text of PTX: statements, operands and declarations.
#pragma once

#include "types.h"

#include <string>
#include <vector>

namespace soft_gpu {

std::string without_comments(const std::string & text);
std::string trimmed(const std::string & text);
// Joins lines into one.
std::string in_one_line(const std::string & text);
// Splits at commas outside of brackets.
std::vector<std::string> split_operands(const std::string & text);

// An instruction's text in parts.
struct Statement {
    std::string text, guard, mnemonic; // guard: predicate, or empty
    bool guard_negated = false;
    std::vector<std::string> modifiers; // without types
    std::vector<Type> types;
    std::vector<std::string> operands;
    mutable std::vector<bool> is_read; // of each modifier

    explicit Statement(const std::string & text);
    // True if there is such a modifier. It counts as read.
    bool has(const std::string & modifier) const;
    // Returns the index of the first name that is a modifier, or -1.
    int which(const std::vector<std::string> & names) const;
    // Returns the last type, for which most instructions are named.
    Type type() const { return types.empty() ? Type::NONE : types.back(); }
    // Returns a modifier that changes the result and was not read, or an empty string.
    std::string unread() const;
    const std::string & operand(size_t index) const;
};

// A variable or parameter.
struct Declaration {
    std::string space, name, initializer;
    Type type = Type::NONE;
    u32 alignment = 1;
    u64 count = 1;
    bool is_extern = false;

    explicit Declaration(const std::string & text);
    u64 bytes() const { return count * bytes_of(type); }
};

// Reads an integer, or the bits of a float, that spans the whole text.
bool read_number(const std::string & text, u64 & value);

} // namespace soft_gpu
