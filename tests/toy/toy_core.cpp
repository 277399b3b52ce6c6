// The core with a made-up architecture. Writes float32 logits after each token to a file: of a
// prefill in micro-batches; then of half a prefill, a verified tree with a committed branch, and
// single steps.
//
//     toy_core MODEL OUT TOKEN...
#include "../cpp/passes.h"
#include "arch/arch.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace dfl {

extern const Arch LLAMA, TOY;

// Replaces csrc/arch/table.cpp, which the linker takes from the library only if it is missing.
const std::vector<const Arch *> & architectures() {
    static const std::vector<const Arch *> table = {&LLAMA, &TOY};
    return table;
}

} // namespace dfl

using namespace dfl;

static std::shared_ptr<Engine> engine_of(const std::shared_ptr<const Model> & model) {
    EngineParams params;
    params.n_ctx = 256;
    params.n_ubatch = 16;
    params.n_threads = 2;
    params.type_k = params.type_v = GGML_TYPE_F32;
    return std::make_shared<Engine>(model, params);
}

int main(int argc, char ** argv) {
    std::vector<int32_t> tokens;
    for (int i = 3; i < argc; ++i) {
        tokens.push_back(std::atoi(argv[i]));
    }
    ModelParams params;
    params.n_gpu_layers = 0;
    const auto model = std::make_shared<const Model>(argv[1], params);
    const int64_t n = static_cast<int64_t>(tokens.size()), n_vocab = model->hparams().n_vocab;
    std::vector<float> at_once(n * n_vocab), by_steps(n * n_vocab);

    Sequence whole(engine_of(model));
    prefill(whole, tokens.data(), n, at_once.data());

    const auto engine = engine_of(model);
    Sequence steps(engine);
    const int64_t half = n / 2;
    prefill(steps, tokens.data(), half, by_steps.data());
    // Nodes 0, 2 and 4 follow the text; nodes 1 and 3 are rejected.
    const int32_t nodes[] = {tokens[half], 1, tokens[half + 1], 2, tokens[half + 2]};
    const int32_t parents[] = {-1, 0, 0, 2, 2}, path[] = {0, 2, 4};
    engine->reserve_verify(5);
    verify(steps, nodes, parents, 5);
    for (int64_t i = 0; i < 3; ++i) {
        steps.logits({path[i]}, by_steps.data() + (half + i) * n_vocab);
    }
    commit(steps, path, 3);
    for (int64_t i = half + 3; i < n; ++i) {
        prefill(steps, &tokens[i], 1);
        steps.logits({0}, by_steps.data() + i * n_vocab);
    }

    std::FILE * out = std::fopen(argv[2], "wb");
    for (const std::vector<float> & logits : {at_once, by_steps}) {
        std::fwrite(logits.data(), sizeof(float), logits.size(), out);
    }
    return std::fclose(out);
}
