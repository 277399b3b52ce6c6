// Llama and models of its structure (SmolLM2): rope on adjacent pairs, no head norms.
#include "arch/arch.h"
#include "gguf_schema.h"

namespace dfl {

static Hparams read(const GgufFile & file) {
    return read_common_hparams(file, {GGML_ROPE_TYPE_NORMAL});
}

static void bind(WeightLoader & loader) { bind_decoder(loader, {}); }

extern const Arch LLAMA = {schema::ARCH_LLAMA, read, bind, build_attention_decoder};

} // namespace dfl
