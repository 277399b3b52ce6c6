#include "text.h"

#include "error.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <set>
#include <sstream>

namespace soft_gpu {

namespace {

struct TypeName {
    const char * name;
    Type type;
    size_t bytes;
};

const TypeName TYPE_NAMES[] = {
    {"pred", Type::PRED, 1},     {"u8", Type::U8, 1},     {"s8", Type::S8, 1},
    {"u16", Type::U16, 2},       {"s16", Type::S16, 2},   {"u32", Type::U32, 4},
    {"s32", Type::S32, 4},       {"u64", Type::U64, 8},   {"s64", Type::S64, 8},
    {"f16", Type::F16, 2},       {"bf16", Type::BF16, 2}, {"f32", Type::F32, 4},
    {"f64", Type::F64, 8},       {"tf32", Type::TF32, 4}, {"f16x2", Type::F16X2, 4},
    {"bf16x2", Type::BF16X2, 4}, {"b8", Type::U8, 1},     {"b16", Type::U16, 2},
    {"b32", Type::U32, 4},       {"b64", Type::U64, 8},   {"b128", Type::B128, 16},
};

// Modifiers that say how fast, how visible or how precise at least, which changes no result here.
const std::set<std::string> WITHOUT_EFFECT = {
    "acq_rel", "acquire",  "aligned", "approx",  "ca",      "cg",  "cluster", "const",
    "cs",      "cta",      "ftz",     "full",    "global",  "gpu", "L1",      "lo",
    "lu",      "nc",       "noftz",   "relaxed", "release", "rn",  "sync",    "sys",
    "uni",     "volatile", "weak",    "wb",      "wt"};

bool is_name_part(char letter) {
    return std::isalnum(static_cast<unsigned char>(letter)) != 0 ||
           std::string("_$%.").find(letter) != std::string::npos;
}

} // namespace

Type type_of(const std::string & name) {
    for (const TypeName & known : TYPE_NAMES) {
        if (name == known.name) {
            return known.type;
        }
    }
    return Type::NONE;
}

size_t bytes_of(Type type) {
    for (const TypeName & known : TYPE_NAMES) {
        if (type == known.type) {
            return known.bytes;
        }
    }
    throw Error("a type is missing");
}

bool is_float(Type type) {
    return type == Type::F16 || type == Type::BF16 || type == Type::F32 || type == Type::F64 ||
           type == Type::F16X2 || type == Type::BF16X2;
}

std::string without_comments(const std::string & text) {
    std::string kept;
    kept.reserve(text.size());
    for (size_t at = 0; at < text.size();) {
        const size_t slash = std::min(text.find('/', at), text.size());
        kept.append(text, at, slash - at);
        if (text.compare(slash, 2, "//") == 0) {
            at = std::min(text.find('\n', slash), text.size());
        } else if (text.compare(slash, 2, "/*") == 0) {
            at = std::min(text.find("*/", slash), text.size() - 2) + 2;
        } else {
            kept.append(text, slash, 1);
            at = slash + 1;
        }
    }
    return kept;
}

std::string trimmed(const std::string & text) {
    const size_t first = text.find_first_not_of(" \t\r\n");
    return first == std::string::npos
               ? ""
               : text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

std::string in_one_line(const std::string & text) {
    std::stringstream words(text);
    std::string line;
    for (std::string word; words >> word;) {
        line += (line.empty() ? "" : " ") + word;
    }
    return line;
}

std::vector<std::string> split_operands(const std::string & text) {
    std::vector<std::string> parts;
    std::string part;
    int depth = 0;
    for (const char letter : text) {
        depth += std::string("{[(").find(letter) != std::string::npos;
        depth -= std::string("}])").find(letter) != std::string::npos;
        if (letter == ',' && depth == 0) {
            parts.push_back(trimmed(part));
            part.clear();
        } else {
            part += letter;
        }
    }
    if (!trimmed(part).empty()) {
        parts.push_back(trimmed(part));
    }
    return parts;
}

Statement::Statement(const std::string & whole) : text(whole) {
    std::string rest = whole;
    if (rest[0] == '@') {
        guard_negated = rest[1] == '!';
        const size_t end = rest.find_first_of(" \t\n");
        require(end != std::string::npos, "a guard without an instruction: " + whole);
        guard = rest.substr(guard_negated ? 2 : 1, end - (guard_negated ? 2 : 1));
        rest = trimmed(rest.substr(end));
    }
    const size_t end = std::min(rest.find_first_of(" \t\n{[("), rest.size());
    std::stringstream parts(rest.substr(0, end));
    std::getline(parts, mnemonic, '.');
    for (std::string part; std::getline(parts, part, '.');) {
        if (type_of(part) != Type::NONE) {
            types.push_back(type_of(part));
        } else {
            modifiers.push_back(part);
        }
    }
    is_read.resize(modifiers.size());
    operands = split_operands(rest.substr(end));
}

bool Statement::has(const std::string & modifier) const {
    for (size_t i = 0; i < modifiers.size(); ++i) {
        if (modifiers[i] == modifier) {
            is_read[i] = true;
            return true;
        }
    }
    return false;
}

int Statement::which(const std::vector<std::string> & names) const {
    for (size_t i = 0; i < names.size(); ++i) {
        if (has(names[i])) {
            return static_cast<int>(i);
        }
    }
    return -1;
}

std::string Statement::unread() const {
    for (size_t i = 0; i < modifiers.size(); ++i) {
        const std::string & name = modifiers[i];
        const bool is_cache_hint = name.find("L1::") == 0 || name.find("L2::") == 0;
        if (!is_read[i] && !is_cache_hint && WITHOUT_EFFECT.count(name) == 0) {
            return name;
        }
    }
    return "";
}

const std::string & Statement::operand(size_t index) const {
    require(index < operands.size(), "operand " + std::to_string(index + 1) + " is missing");
    return operands[index];
}

Declaration::Declaration(const std::string & text) {
    const size_t equals = text.find('=');
    std::string head = text.substr(0, equals);
    if (equals != std::string::npos) {
        initializer = trimmed(text.substr(equals + 1));
    }
    const size_t bracket = head.find('[');
    if (bracket != std::string::npos) {
        count = std::strtoull(head.c_str() + bracket + 1, nullptr, 0);
        head.resize(bracket);
    }
    std::stringstream words(head);
    bool is_pointer = false; // the alignment after it is that of the pointer's target
    for (std::string word; words >> word;) {
        if (word == ".align") {
            u32 value = 0;
            words >> value;
            alignment = is_pointer ? alignment : value;
        } else if (word == ".ptr") {
            is_pointer = true;
        } else if (word == ".extern") {
            is_extern = true;
        } else if (word[0] == '.' && type_of(word.substr(1)) != Type::NONE) {
            type = type_of(word.substr(1));
        } else if (word == ".shared" || word == ".local" || word == ".global" || word == ".const" ||
                   word == ".param") {
            space = is_pointer ? space : word.substr(1);
        } else if (word[0] != '.') {
            name = word;
        }
    }
    require(type != Type::NONE && !name.empty(), "a declaration is not understood: " + text);
    alignment = std::max(alignment, static_cast<u32>(bytes_of(type)));
    require(std::all_of(name.begin(), name.end(), is_name_part), "not a name: " + name);
}

bool read_number(const std::string & text, u64 & value) {
    const bool is_float_bits =
        text.size() > 2 && text[0] == '0' && std::string("fFdD").find(text[1]) != std::string::npos;
    const bool is_number =
        is_float_bits ||
        (!text.empty() && (std::isdigit(text[0]) != 0 || (text[0] == '-' && text.size() > 1)));
    if (!is_number) {
        return false;
    }
    char * end = nullptr;
    if (is_float_bits) {
        value = std::strtoull(text.c_str() + 2, &end, 16);
    } else if (text[0] == '-') {
        value = static_cast<u64>(std::strtoll(text.c_str(), &end, 0));
    } else {
        value = std::strtoull(text.c_str(), &end, 0);
    }
    return *end == '\0' || std::strcmp(end, "U") == 0;
}

} // namespace soft_gpu
