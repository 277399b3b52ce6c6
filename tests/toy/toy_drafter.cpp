// The core with a made-up kind of drafter beside DFlash in one engine. Checks that drafted text
// equals plain decoding with either, and writes the float32 logits [4][n_vocab] of three drafts.
//
//     toy_drafter MODEL DFLASH_DRAFTER STEPWISE_DRAFTER OUT TOKEN...
#include "../cpp/check.h"
#include "../cpp/passes.h"

#include <cstdio>
#include <cstdlib>

namespace dfl {

extern const DraftKind DFLASH, STEPWISE;

// Replaces csrc/draft/table.cpp, which the linker takes from the library only if it is missing.
const std::vector<const DraftKind *> & draft_kinds() {
    static const std::vector<const DraftKind *> table = {&DFLASH, &STEPWISE};
    return table;
}

} // namespace dfl

using namespace dfl;

using Tokens = std::vector<int32_t>;

static constexpr int64_t N_DRAFT = 4;

static std::shared_ptr<Engine> engine_of(const std::shared_ptr<const Model> & model,
                                         std::vector<std::shared_ptr<const Drafter>> drafters) {
    EngineParams params;
    params.n_ctx = 512;
    params.n_parallel = 2;
    params.n_ubatch = 16;
    params.n_threads = 2;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.drafters = std::move(drafters);
    return std::make_shared<Engine>(model, params);
}

static Tokens decode(Sequence & sequence, int32_t last, int64_t n) {
    Tokens text = {last};
    while (static_cast<int64_t>(text.size()) < n) {
        prefill(sequence, &text.back(), 1);
        text.push_back(sequence.argmax(0));
    }
    return text;
}

// Decodes in rounds of one drafter. Every other round verifies the next plain tokens and a wrong
// one, so that several tokens are accepted.
static Tokens decode_in_rounds(Sequence & sequence, int64_t drafter, const Tokens & plain) {
    Engine & engine = sequence.engine();
    Tokens text = {plain.front()};
    for (int64_t round = 0; text.size() < plain.size(); ++round) {
        Tokens nodes = {text.back()};
        if (round % 2 == 0) {
            const Draft draft = engine.draft(drafter, {{&sequence, text.back(), N_DRAFT}}, 2);
            for (int64_t i = 0; i < N_DRAFT; ++i) {
                nodes.push_back(draft.best[2 * i].token);
            }
        } else {
            const size_t end = std::min(text.size() + 3, plain.size());
            nodes.insert(nodes.end(), plain.begin() + text.size(), plain.begin() + end);
            nodes.push_back(nodes.back() == 0);
        }
        verify(sequence, nodes.data(), nullptr, static_cast<int64_t>(nodes.size()));
        int64_t n = 0;
        do {
            text.push_back(sequence.argmax(n++));
        } while (n < static_cast<int64_t>(nodes.size()) && nodes[n] == text.back());
        commit(sequence, nullptr, n);
    }
    text.resize(plain.size());
    return text;
}

static void write(std::FILE * out, const Draft & draft, int64_t n_vocab) {
    for (size_t i = 0; i < draft.log_sum_exp.size(); ++i) {
        std::vector<float> row(n_vocab);
        for (int64_t j = 0; j < n_vocab; ++j) {
            const Candidate & candidate = draft.best[i * n_vocab + j];
            row[candidate.token] = candidate.logit;
        }
        std::fwrite(row.data(), sizeof(float), row.size(), out);
    }
}

int main(int argc, char ** argv) {
    Tokens tokens;
    for (int i = 5; i < argc; ++i) {
        tokens.push_back(std::atoi(argv[i]));
    }
    ModelParams params;
    params.n_gpu_layers = 0;
    const auto model = std::make_shared<const Model>(argv[1], params);
    const auto dflash = std::make_shared<const Drafter>(argv[2], model, params);
    const auto stepwise = std::make_shared<const Drafter>(argv[3], model, params);
    const int64_t n = static_cast<int64_t>(tokens.size()) / 2, n_vocab = model->hparams().n_vocab;
    const auto engine = engine_of(model, {dflash, stepwise});
    CHECK(engine->caches().size() > engine_of(model, {stepwise})->caches().size());
    std::FILE * out = std::fopen(argv[4], "wb");
    {
        // Draft after the first half, and after a restored prefix and five more tokens.
        Sequence first(engine), second(engine);
        prefill(first, tokens.data(), n);
        second.restore(*first.snapshot(), n);
        prefill(second, &tokens[n], 5);
        const std::vector<DraftRequest> requests = {{&first, tokens[n], N_DRAFT},
                                                    {&second, tokens[n + 5], N_DRAFT}};
        write(out, engine->draft(1, requests, n_vocab), n_vocab);
        // Draft after a committed path of a tree.
        const int32_t nodes[] = {tokens[n], 1, tokens[n + 1], 2, tokens[n + 2]};
        const int32_t parents[] = {-1, 0, 0, 2, 2}, path[] = {0, 2, 4};
        verify(first, nodes, parents, 5);
        commit(first, path, 3);
        write(out, engine->draft(1, {{&first, tokens[n + 3], N_DRAFT}}, n_vocab), n_vocab);
    }
    Sequence alone(engine_of(model, {}));
    prefill(alone, tokens.data(), n);
    const Tokens plain = decode(alone, alone.argmax(0), 60);
    for (int64_t drafter = 0; drafter < 2; ++drafter) {
        Sequence sequence(engine), restored(engine);
        prefill(sequence, tokens.data(), n);
        const auto prefix = sequence.snapshot();
        CHECK(decode_in_rounds(sequence, drafter, plain) == plain);
        restored.restore(*prefix, n);
        CHECK(decode_in_rounds(restored, drafter, plain) == plain);
        restored.restore(*prefix, n);
        CHECK(decode_in_rounds(restored, 1 - drafter, plain) == plain);
    }
    return std::fclose(out);
}
