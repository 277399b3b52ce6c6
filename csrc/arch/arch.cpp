#include "arch/arch.h"

#include "error.h"

namespace dfl {

static const Arch * const TABLE[] = {&LLAMA, &QWEN3, &QWEN3MOE, &QWEN35, &QWEN35MOE};

const Arch & find_arch(const GgufFile & file) {
    std::string known;
    for (const Arch * arch : TABLE) {
        if (file.arch() == arch->name) {
            return *arch;
        }
        known += (known.empty() ? "" : ", ") + std::string(arch->name);
    }
    throw Error(DFL_STATUS_UNSUPPORTED,
                format("%s: architecture \"%s\" cannot be run as a target; supported: %s",
                       file.path().c_str(), file.arch().c_str(), known.c_str()));
}

} // namespace dfl
