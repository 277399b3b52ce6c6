// Qwen3, dense and with experts: Llama with head norms and rope on halves of a head.
#include "arch/arch.h"
#include "gguf_schema.h"

namespace dfl {

static Hparams read(const GgufFile & file) {
    return read_common_hparams(file, {GGML_ROPE_TYPE_NEOX});
}

static Hparams read_moe(const GgufFile & file) {
    Hparams hp = read(file);
    hp.experts = read_expert_shape(file, /*shared =*/false);
    return hp;
}

static void bind(WeightLoader & loader) {
    BlockOptions options;
    options.head_norms = true;
    bind_decoder(loader, options);
}

extern const Arch QWEN3 = {schema::ARCH_QWEN3, read, bind, build_attention_decoder};
extern const Arch QWEN3MOE = {schema::ARCH_QWEN3MOE, read_moe, bind, build_attention_decoder};

} // namespace dfl
