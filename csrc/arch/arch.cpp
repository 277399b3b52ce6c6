#include "arch/arch.h"

#include "error.h"
#include "gguf_schema.h"

#include <string>

namespace dfl {

extern const Arch & find_arch(const GgufFile & file) {
    std::string names;
    for (const Arch * arch : architectures()) {
        if (file.arch() == arch->name) {
            return *arch;
        }
        names += (names.empty() ? "" : ", ") + std::string(arch->name);
    }
    DFL_CHECK(file.arch() != schema::ARCH_CLIP, DFL_STATUS_UNSUPPORTED,
              "%s: is the vision part of a model (architecture \"%s\"); the text part is needed",
              file.path().c_str(), file.arch().c_str());
    throw Error(DFL_STATUS_UNSUPPORTED,
                format("%s: architecture \"%s\" cannot be run as a target; supported: %s",
                       file.path().c_str(), file.arch().c_str(), names.c_str()));
}

} // namespace dfl
