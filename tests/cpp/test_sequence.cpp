// Sequence: micro-batches, and going back to a common prefix of the next prompt.
#include "engine/sequence.h"

#include "check.h"
#include "models.h"
#include "passes.h"

#include <cmath>
#include <cstring>

using namespace dfl;

namespace {

constexpr int N_TOKENS = 30;
using Logits = std::vector<float>;

std::vector<int32_t> prompt() {
    std::vector<int32_t> tokens(N_TOKENS);
    for (int i = 0; i < N_TOKENS; ++i) {
        tokens[i] = (7 + 13 * i * i) % N_VOCAB;
    }
    return tokens;
}

Sequence make(const std::shared_ptr<const Model> & model, int64_t n_ubatch,
              ggml_type type = GGML_TYPE_F32) {
    EngineParams params;
    params.n_ctx = 40;
    params.n_ubatch = n_ubatch;
    params.n_threads = 1;
    params.type_k = params.type_v = type;
    return Sequence(std::make_shared<Engine>(model, params));
}

Logits all_logits(Sequence & sequence) {
    const std::vector<int32_t> tokens = prompt();
    Logits logits(N_TOKENS * N_VOCAB);
    prefill(sequence, tokens.data(), N_TOKENS, logits.data());
    return logits;
}

float distance(const Logits & a, const Logits & b) {
    float largest = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        largest = std::fmax(largest, std::fabs(a[i] - b[i]));
    }
    return largest;
}

void micro_batches_change_nothing(const std::shared_ptr<const Model> & model) {
    Sequence whole = make(model, 40);
    const Logits expected = all_logits(whole);
    for (int64_t n_ubatch : {1, 2, 7, 29, 30}) {
        Sequence sequence = make(model, n_ubatch);
        CHECK(distance(all_logits(sequence), expected) < 1e-4f);
        sequence.reset();
        CHECK(distance(all_logits(sequence), expected) < 1e-4f);
    }
    Sequence half = make(model, 7, GGML_TYPE_F16);
    CHECK(distance(all_logits(half), expected) < 0.1f);
}

// Prompts with common prefixes, and uncommitted verifies between them: the rows that remain of one
// prompt give the logits of a fresh sequence for the next.
void taken_back_to_any_prompt(const std::shared_ptr<const Model> & model) {
    const bool recurs = model->hparams().n_recurrent() > 0;
    Sequence sequence = make(model, 8), fresh = make(model, 8);
    sequence.engine().reserve_verify(3);
    std::vector<int32_t> timeline;
    uint32_t random = 1;
    const auto below = [&](int64_t n) {
        random = random * 1664525u + 1013904223u;
        return static_cast<int64_t>(random >> 8) % n;
    };
    for (int step = 0; step < 60; ++step) {
        std::vector<int32_t> tokens = prompt();
        tokens.resize(1 + below(N_TOKENS));
        const int64_t other = below(2 * N_TOKENS);
        if (other < static_cast<int64_t>(tokens.size())) {
            tokens[other] = (tokens[other] + 1 + step % 2) % N_VOCAB;
        }
        const int64_t n = tokens.size();
        int64_t same = 0;
        while (same < std::min<int64_t>(n - 1, timeline.size()) && tokens[same] == timeline[same]) {
            ++same;
        }
        const bool goes_back = same < static_cast<int64_t>(timeline.size());
        const int64_t there = recurs && goes_back ? 0 : same;
        commit(sequence, nullptr, 0);
        if (there == 0) {
            sequence.reset();
        } else {
            sequence.restore(*sequence.snapshot(), there);
        }
        CHECK(sequence.position() == there);
        prefill(sequence, tokens.data() + there, n - there);
        fresh.reset();
        prefill(fresh, tokens.data(), n);
        Logits found(N_VOCAB), expected(N_VOCAB);
        sequence.logits({0}, found.data());
        fresh.logits({0}, expected.data());
        CHECK(distance(found, expected) < 1e-4f);
        timeline = tokens;
        const int32_t tree[] = {3, 1, 4}, parents[] = {-1, 0, 0}, path[] = {0, 2};
        verify(sequence, tree, parents, 3);
        const int64_t n_committed = below(3);
        if (n_committed > 0) {
            commit(sequence, path, n_committed);
            timeline.push_back(3);
            if (n_committed == 2) {
                timeline.push_back(4);
            }
        }
    }
}

} // namespace

int main() {
    for (const char * name : {"small-llama", "small-qwen35"}) {
        const auto model = std::make_shared<const Model>(model_path(name), on_cpu());
        micro_batches_change_nothing(model);
        taken_back_to_any_prompt(model);
    }
}
