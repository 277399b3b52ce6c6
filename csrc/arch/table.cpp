// Table of the supported architectures.
#include "arch/arch.h"

namespace dfl {

extern const Arch LLAMA, QWEN2, QWEN3, QWEN3MOE, QWEN35, QWEN35MOE, QWEN3NEXT, GPT_OSS, GEMMA3,
    GEMMA4;

const std::vector<const Arch *> & architectures() {
    static const std::vector<const Arch *> table = {
        &LLAMA,     &QWEN2,     &QWEN3,   &QWEN3MOE, &QWEN35,
        &QWEN35MOE, &QWEN3NEXT, &GPT_OSS, &GEMMA3,   &GEMMA4,
    };
    return table;
}

} // namespace dfl
