#include "module.h"

#include "error.h"
#include "memory_check.h"

#include <algorithm>
#include <cstdlib>

namespace soft_gpu {

namespace {

constexpr size_t ALIGNMENT = 256;

size_t closing_bracket(const std::string & text, size_t open) {
    int depth = 0;
    for (size_t at = open; at < text.size(); ++at) {
        depth += text[at] == '{';
        depth -= text[at] == '}';
        if (depth == 0) {
            return at;
        }
    }
    throw Error("a bracket is not closed");
}

bool has_word(const std::string & text, const char * word) {
    return text.find(word) != std::string::npos;
}

// Writes the values of an initializer like {1, 2} or 0f3F800000.
void initialize(u8 * memory, const Declaration & variable) {
    std::string values = variable.initializer;
    if (!values.empty() && values[0] == '{') {
        values = values.substr(1, values.rfind('}') - 1);
    }
    const size_t bytes = bytes_of(variable.type);
    size_t at = 0;
    for (const std::string & text : split_operands(values)) {
        u64 value = 0;
        require(read_number(text, value) && at < variable.count,
                "the initializer of " + variable.name + " is not understood: " + text);
        std::memcpy(memory + at++ * bytes, &value, bytes);
    }
}

} // namespace

Module::Module(const std::string & ptx) {
    const std::string text = without_comments(ptx);
    for (size_t at = 0; (at = text.find_first_not_of(" \t\r\n;", at)) != std::string::npos;) {
        const bool is_line =
            text.compare(at, 8, ".version") == 0 || text.compare(at, 7, ".target") == 0 ||
            text.compare(at, 13, ".address_size") == 0 || text.compare(at, 5, ".file") == 0;
        if (is_line) {
            at = std::min(text.find('\n', at), text.size());
            continue;
        }
        require(text[at] == '.', "no directive: " + text.substr(at, 80));
        const size_t end = text.find_first_of(";{", at);
        require(end != std::string::npos, "a directive does not end: " + text.substr(at, 80));
        const std::string head = text.substr(at, end - at);
        const bool is_entry = has_word(head, ".entry"), is_function = has_word(head, ".func");
        if (is_entry || is_function || has_word(head, ".section")) {
            const bool is_declared = text[end] == ';'; // without a body
            const size_t last = is_declared ? end : closing_bracket(text, end);
            if (is_entry && !is_declared) {
                read_entry(head, text.substr(end + 1, last - end - 1));
            }
            at = last + 1;
        } else {
            const size_t last = std::min(text.find(';', at), text.size());
            read_variable(text.substr(at, last - at));
            at = last;
        }
    }
}

void Module::read_variable(const std::string & text) {
    const Declaration variable(text);
    if (variable.space == "shared") {
        if (variable.is_extern) {
            variables_.dynamic.push_back(variable);
            return;
        }
        u32 & end = variables_.shared_bytes;
        end = (end + variable.alignment - 1) / variable.alignment * variable.alignment;
        variables_.symbols[variable.name] = end;
        end += static_cast<u32>(variable.bytes());
        return;
    }
    require(variable.space == "global" || variable.space == "const",
            "a variable is not understood: " + text);
    if (variable.is_extern) {
        return; // its use is an unknown operand
    }
    const size_t whole = (variable.bytes() + 2 * ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    auto * memory = static_cast<u8 *>(std::aligned_alloc(ALIGNMENT, whole));
    require(memory != nullptr, "no memory for " + variable.name);
    memory_.emplace_back(memory, std::free);
    std::memset(memory, 0, whole);
    initialize(memory, variable);
    allow_memory(memory, variable.bytes());
    variables_.symbols[variable.name] = reinterpret_cast<u64>(memory);
}

void Module::read_entry(const std::string & head, const std::string & body) {
    const size_t start = head.find(".entry") + 6;
    const size_t open = head.find('(', start), close = head.rfind(')');
    const std::string name = trimmed(head.substr(start, std::min(open, head.size()) - start));
    Entry entry = {open == std::string::npos ? "" : head.substr(open + 1, close - open - 1), body,
                   0, nullptr};
    for (const char * limit : {".maxntid", ".reqntid"}) {
        const size_t found = head.find(limit);
        if (found != std::string::npos) {
            entry.max_threads = 1;
            const size_t end = head.find_first_of(".\n", found + 1);
            for (const std::string & size :
                 split_operands(head.substr(found + 8, std::min(end, head.size()) - found - 8))) {
                entry.max_threads *= static_cast<u32>(std::stoul(size));
            }
        }
    }
    entries_[trimmed(name.substr(0, name.find_first_of(" \t\n.")))] = std::move(entry);
}

const Kernel & Module::kernel(const std::string & name) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(name);
    require(found != entries_.end(), "the module has no kernel " + name);
    Entry & entry = found->second;
    if (entry.decoded == nullptr) {
        auto kernel = std::make_unique<Kernel>();
        kernel->name = name;
        kernel->max_threads = entry.max_threads;
        const Decoder decoder(*kernel, variables_, entry.parameters, entry.body);
        entry.decoded = std::move(kernel);
    }
    return *entry.decoded;
}

std::string Module::unknown_instructions() {
    std::string all;
    for (const auto & entry : entries_) {
        const Kernel & decoded = kernel(entry.first);
        for (size_t i = 0; i < decoded.code.size(); ++i) {
            const bool is_trap = decoded.texts[i].find("trap") == 0;
            if (decoded.code[i].flow == Flow::TRAP && !is_trap) {
                all += decoded.name + ": " + decoded.texts[i] + "\n";
            }
        }
    }
    return all;
}

u64 Module::address(const std::string & variable) const {
    const auto found = variables_.symbols.find(variable);
    return found != variables_.symbols.end() ? found->second : 0;
}

} // namespace soft_gpu
