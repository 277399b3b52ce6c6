// Qwen2 and Qwen2.5: Llama with rope on halves of a head, and biases of projections if present.
#include "arch/arch.h"
#include "gguf_schema.h"

namespace dfl {

static Hparams read(const GgufFile & file) {
    return read_common_hparams(file, {GGML_ROPE_TYPE_NEOX});
}

static void bind(WeightLoader & loader) { bind_decoder(loader, {}); }

extern const Arch QWEN2 = {schema::ARCH_QWEN2, read, bind, build_attention_decoder};

} // namespace dfl
