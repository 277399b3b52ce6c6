#include "decoder.h"

#include "error.h"
#include "special_registers.h"

#include <algorithm>
#include <cctype>

namespace soft_gpu {

namespace {

u32 aligned(u64 offset, u32 alignment) {
    return static_cast<u32>((offset + alignment - 1) / alignment * alignment);
}

const std::unordered_map<std::string, Decode> & decoders() {
    static const auto all = [] {
        std::unordered_map<std::string, Decode> made;
        for (const auto * table : {&ARITHMETIC, &BITS, &COMPARISONS, &CONVERSIONS, &MEMORY,
                                   &ATOMICS, &ASYNC_COPIES, &EXCHANGES, &MATRICES, &CONTROL}) {
            for (const Operation & operation : *table) {
                made[operation.mnemonic] = operation.decode;
            }
        }
        return made;
    }();
    return all;
}

// Calls found(statement) for the statements of a body, with labels and brackets as statements.
template <class Found>
void for_statements(const std::string & text, Found && found) {
    for (size_t at = 0; (at = text.find_first_not_of(" \t\r\n;", at)) != std::string::npos;) {
        size_t end = at;
        while (end < text.size() && (std::isalnum(static_cast<unsigned char>(text[end])) != 0 ||
                                     text[end] == '_' || text[end] == '$' || text[end] == '%')) {
            ++end;
        }
        if (text[at] == '{' || text[at] == '}') {
            end = at + 1;
        } else if (end > at && end < text.size() && text[end] == ':') {
            ++end;
        } else if (text.compare(at, 5, ".loc ") == 0 || text.compare(at, 5, ".loc\t") == 0) {
            at = std::min(text.find('\n', at), text.size());
            continue;
        } else {
            end = std::min(text.find(';', at), text.size());
        }
        found(trimmed(text.substr(at, end - at)));
        at = end;
    }
}

bool declares(const std::string & statement, const char * space) {
    return statement[0] == '.' && statement.find(space) == 0;
}

} // namespace

Decoder::Decoder(Kernel & kernel, const Variables & variables, const std::string & parameters,
                 const std::string & body)
    : kernel_(kernel), globals_(variables.symbols) {
    for (const SpecialRegister & special : special_registers()) {
        scopes_[0][special.name] = {allocate(4, 0), 4};
    }
    declare_parameters(parameters);
    lay_out_shared(body, variables);
    decode_body(body);
    resolve_jumps();
}

Register Decoder::allocate(size_t bytes, u8 fill) {
    const auto at = static_cast<Register>(kernel_.registers.size());
    kernel_.registers.resize(at + N_LANES * bytes, fill);
    return at;
}

Register Decoder::constant(size_t bytes, u64 value) {
    const auto [known, is_new] = constants_.insert({{bytes, value}, NO_REGISTER});
    if (is_new) {
        require(bytes <= 8, "a constant of 16 bytes");
        known->second = allocate(bytes, 0);
        for (int lane = 0; lane < N_LANES; ++lane) {
            std::memcpy(&kernel_.registers[known->second + lane * bytes], &value, bytes);
        }
    }
    return known->second;
}

const Decoder::Named * Decoder::find(const std::string & name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
        const auto found = scope->find(name);
        if (found != scope->end()) {
            return &found->second;
        }
    }
    return nullptr;
}

bool Decoder::value_of(const std::string & operand, u64 & value) const {
    if (operand == "WARP_SZ") {
        value = N_LANES;
        return true;
    }
    for (const Symbols * symbols : {&symbols_, &globals_}) {
        const auto found = symbols->find(operand);
        if (found != symbols->end()) {
            value = found->second;
            return true;
        }
    }
    return read_number(operand, value);
}

Register Decoder::read(const std::string & operand, size_t bytes, size_t * found_bytes) {
    if (operand == "_") {
        return NO_REGISTER;
    }
    if (const Named * named = find(operand)) {
        require(found_bytes != nullptr || named->bytes == bytes,
                operand + " has " + std::to_string(named->bytes) + " bytes, expected " +
                    std::to_string(bytes));
        if (found_bytes != nullptr) {
            *found_bytes = named->bytes;
        }
        return named->at;
    }
    u64 value = 0;
    require(value_of(operand, value), "unknown operand " + operand);
    // Values of 8 bits live in registers of 16, as constants of memory operations do.
    const size_t size = found_bytes != nullptr ? std::max<size_t>(bytes, 2) : bytes;
    if (found_bytes != nullptr) {
        *found_bytes = size;
    }
    return constant(size, value);
}

Register Decoder::write(const std::string & operand, size_t bytes, size_t * found_bytes) {
    require(operand == "_" || (find(operand) != nullptr &&
                               find(operand)->at >= N_LANES * 4 * special_registers().size()),
            operand + " is no register");
    return read(operand, bytes, found_bytes);
}

Register Decoder::predicate(const std::string & operand, bool & negated) {
    negated = operand[0] == '!';
    const std::string name = negated ? trimmed(operand.substr(1)) : operand;
    u64 value = 0;
    return find(name) == nullptr && value_of(name, value) ? constant(1, value != 0) : read(name, 1);
}

void Decoder::write_both(const std::string & operand, size_t bytes, Instruction & instruction) {
    const size_t bar = operand.find('|');
    instruction.target = write(trimmed(operand.substr(0, bar)), bytes);
    if (bar != std::string::npos) {
        instruction.second = write(trimmed(operand.substr(bar + 1)), 1);
    }
}

Address Decoder::address(const std::string & operand, Space space) {
    require(operand.size() > 2 && operand.front() == '[' && operand.back() == ']',
            "not an address: " + operand);
    std::string inner = trimmed(operand.substr(1, operand.size() - 2));
    Address address;
    address.space = space;
    const size_t plus = inner.find_first_of("+-", 1);
    if (plus != std::string::npos) {
        const std::string offset = inner.substr(plus + (inner[plus] == '+' ? 1 : 0));
        address.offset = static_cast<s64>(number(trimmed(offset)));
        inner = trimmed(inner.substr(0, plus));
    }
    size_t bytes = 8;
    address.base = read(inner, 8, &bytes);
    address.base_bytes = static_cast<u8>(bytes);
    require(bytes == 4 || bytes == 8, "an address of " + std::to_string(bytes) + " bytes");
    return address;
}

size_t Decoder::list(const std::string & operand, size_t bytes, Register * registers,
                     size_t * found_bytes) {
    const std::vector<std::string> elements =
        operand[0] == '{' ? split_operands(operand.substr(1, operand.size() - 2))
                          : std::vector<std::string>{operand};
    require(elements.size() <= 4, "more than 4 elements: " + operand);
    for (size_t i = 0; i < elements.size(); ++i) {
        size_t size = bytes;
        registers[i] = read(elements[i], bytes, found_bytes != nullptr ? &size : nullptr);
        if (found_bytes != nullptr && registers[i] != NO_REGISTER) {
            require(i == 0 || *found_bytes == size || registers[0] == NO_REGISTER,
                    "elements of different sizes: " + operand);
            *found_bytes = size;
        }
    }
    return elements.size();
}

void Decoder::operands(const Statement & statement, Instruction & instruction, size_t target_bytes,
                       const std::vector<size_t> & source_bytes) {
    require(statement.operands.size() == source_bytes.size() + 1,
            std::to_string(source_bytes.size()) + " sources are expected");
    instruction.target = write(statement.operand(0), target_bytes);
    for (size_t i = 0; i < source_bytes.size(); ++i) {
        instruction.source[i] = read(statement.operand(i + 1), source_bytes[i]);
    }
}

u64 Decoder::number(const std::string & operand) const {
    u64 value = 0;
    require(read_number(operand, value), "not a number: " + operand);
    return value;
}

void Decoder::declare_registers(const std::string & text) {
    const size_t dot = text.find('.', 4);
    const size_t end = text.find_first_of(" \t\n", dot);
    require(dot != std::string::npos && end != std::string::npos, "registers: " + text);
    const Type type = type_of(text.substr(dot + 1, end - dot - 1));
    const size_t bytes = bytes_of(type);
    // Registers are NaN until written. Predicates must hold 0 or 1.
    const u8 fill = type == Type::PRED ? 0 : 0xff;
    for (const std::string & name : split_operands(text.substr(end))) {
        const size_t bracket = name.find('<');
        if (bracket == std::string::npos) {
            scopes_.back()[name] = {allocate(bytes, fill), bytes};
            continue;
        }
        const int n = std::stoi(name.substr(bracket + 1));
        for (int i = 0; i < n; ++i) {
            scopes_.back()[name.substr(0, bracket) + std::to_string(i)] = {allocate(bytes, fill),
                                                                           bytes};
        }
    }
}

void Decoder::declare_parameters(const std::string & text) {
    for (const std::string & part : split_operands(text)) {
        const Declaration parameter(part);
        const u32 offset = aligned(kernel_.parameter_bytes, parameter.alignment);
        const auto bytes = static_cast<u32>(parameter.bytes());
        symbols_[parameter.name] = offset;
        kernel_.parameters.push_back({offset, bytes});
        kernel_.parameter_bytes = offset + bytes;
    }
}

// Places static arrays first: the dynamic one begins behind all of them.
void Decoder::lay_out_shared(const std::string & body, const Variables & variables) {
    kernel_.shared_bytes = variables.shared_bytes;
    for_statements(body, [&](const std::string & statement) {
        if (declares(statement, ".shared")) {
            const Declaration array(statement);
            kernel_.shared_bytes = aligned(kernel_.shared_bytes, array.alignment);
            require(symbols_.insert({array.name, kernel_.shared_bytes}).second,
                    "two arrays are called " + array.name);
            kernel_.shared_bytes += static_cast<u32>(array.bytes());
        }
    });
    u32 alignment = 16;
    for (const Declaration & array : variables.dynamic) {
        alignment = std::max(alignment, array.alignment);
    }
    const u32 behind = aligned(kernel_.shared_bytes, alignment);
    for (const Declaration & array : variables.dynamic) {
        symbols_[array.name] = behind;
        if (body.find(array.name) != std::string::npos) {
            kernel_.shared_bytes = behind;
        }
    }
}

void Decoder::declare(const std::string & text) {
    if (declares(text, ".reg")) {
        declare_registers(text);
    } else if (declares(text, ".local")) {
        const Declaration array(text);
        kernel_.local_bytes = aligned(kernel_.local_bytes, array.alignment);
        symbols_[array.name] = kernel_.local_bytes;
        kernel_.local_bytes += static_cast<u32>(array.bytes());
    }
}

void Decoder::decode_body(const std::string & text) {
    for_statements(text, [&](const std::string & statement) {
        if (statement == "{") {
            scopes_.emplace_back();
        } else if (statement == "}") {
            require(scopes_.size() > 1, "a bracket too many");
            scopes_.pop_back();
        } else if (statement.back() == ':') {
            const std::string label = statement.substr(0, statement.size() - 1);
            require(labels_.insert({label, static_cast<u32>(kernel_.code.size())}).second,
                    "two labels are called " + label);
        } else if (statement[0] == '.') {
            declare(statement);
        } else {
            decode_statement(statement);
        }
    });
    kernel_.local_bytes = aligned(kernel_.local_bytes, 16);
    Instruction end;
    end.flow = Flow::EXIT;
    kernel_.code.push_back(end);
    kernel_.texts.push_back("end");
}

void Decoder::emit(const Instruction & instruction) {
    kernel_.code.push_back(instruction);
    kernel_.code.back().guard = current_.guard;
    kernel_.code.back().guard_negated = current_.guard_negated;
    kernel_.texts.push_back(current_text_);
}

// An instruction that is not understood ends the run only when it is reached.
void Decoder::decode_statement(const std::string & text) {
    const size_t first = kernel_.code.size(), n_jumps = jumps_.size();
    current_ = {};
    current_text_ = in_one_line(text);
    Instruction instruction;
    try {
        const Statement statement(text);
        if (!statement.guard.empty()) {
            bool negated = false;
            current_.guard = predicate(statement.guard, negated);
            current_.guard_negated = statement.guard_negated;
        }
        const auto decode = decoders().find(statement.mnemonic);
        require(decode != decoders().end(), "unknown instruction");
        if (statement.modifiers.size() > 0 && statement.has("ftz")) {
            flush_denormals();
        }
        decode->second(*this, statement, instruction);
        require(statement.unread().empty(), "unknown modifier ." + statement.unread());
        require(instruction.execute != nullptr || instruction.flow != Flow::NEXT, "unknown type");
    } catch (const Error & error) {
        kernel_.code.resize(first);
        kernel_.texts.resize(first);
        jumps_.resize(n_jumps);
        instruction = {};
        instruction.flow = Flow::TRAP;
        current_text_ += std::string(" (") + error.what() + ")";
    }
    emit(instruction);
}

void Decoder::resolve_jumps() {
    for (const auto & [at, label] : jumps_) {
        const auto found = labels_.find(label);
        require(found != labels_.end(), kernel_.name + ": no label " + label);
        kernel_.code[at].jump = found->second;
    }
}

} // namespace soft_gpu
