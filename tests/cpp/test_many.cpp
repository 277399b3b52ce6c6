// Several sequences in one engine, with each form of recurrent layers: every sequence gets the
// logits that it gets alone.
#include "engine/sequence.h"

#include "check.h"
#include "models.h"
#include "passes.h"

#include <cmath>
#include <random>

using namespace dfl;

namespace {

constexpr int32_t N_SEQUENCES = 3;
using Logits = std::vector<float>;
using Tokens = std::vector<int32_t>;

std::shared_ptr<Engine> engine_of(const std::shared_ptr<const Model> & model, DeltaForm form,
                                  int32_t n_parallel) {
    EngineParams params;
    params.n_ctx = 120;
    params.n_ubatch = 16;
    params.n_threads = 1;
    params.n_parallel = n_parallel;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.delta_form = form;
    auto engine = std::make_shared<Engine>(model, params);
    engine->reserve_verify(24);
    return engine;
}

// Random batches of several sequences, compared with a sequence that runs alone.
class Beside {
  public:
    Beside(const std::shared_ptr<const Model> & model, DeltaForm form, unsigned seed)
        : engine_(engine_of(model, form, N_SEQUENCES)), alone_(engine_of(model, form, 1)),
          random_(seed) {
        for (int i = 0; i < N_SEQUENCES; ++i) {
            sequences_.push_back(std::make_unique<Sequence>(engine_));
        }
    }

    void step() {
        std::vector<BatchEntry> entries;
        std::vector<Tokens> new_tokens(N_SEQUENCES), parents(N_SEQUENCES);
        for (int i = 0; i < N_SEQUENCES; ++i) {
            const int way = below(5);
            Tokens & tokens = new_tokens[i];
            if (way == 0 || tokens_[i].size() > 30) {
                sequences_[i]->reset();
                tokens_[i].clear();
            }
            for (int n = 1 + below(5); n > 0; --n) {
                tokens.push_back(below(N_VOCAB));
            }
            BatchEntry entry;
            entry.sequence = sequences_[i].get();
            entry.is_verify = way >= 3;
            entry.tokens = tokens.data();
            entry.n = static_cast<int64_t>(tokens.size());
            for (int node = 0; node < entry.n; ++node) {
                parents[i].push_back(node == 0 ? -1 : way == 4 ? below(node) : node - 1);
            }
            entry.parents = entry.is_verify ? parents[i].data() : nullptr;
            entries.push_back(entry);
        }
        engine_->run(entries, nullptr);
        std::vector<Tokens> paths(N_SEQUENCES);
        std::vector<Path> committed;
        for (int i = 0; i < N_SEQUENCES; ++i) {
            const BatchEntry & entry = entries[i];
            Tokens & tokens = tokens_[i];
            if (!entry.is_verify) {
                tokens.insert(tokens.end(), new_tokens[i].begin(), new_tokens[i].end());
                check(i, 0, tokens);
                continue;
            }
            const int last = below(static_cast<int>(entry.n));
            for (int node = 0; node < entry.n; ++node) {
                check(i, node, with_path(tokens, new_tokens[i], parents[i], node));
            }
            for (int node = last; node >= 0; node = parents[i][node]) {
                paths[i].insert(paths[i].begin(), node);
            }
            paths[i].resize(below(static_cast<int>(paths[i].size()) + 1));
            committed.push_back({entry.sequence, paths[i].data(), int64_t(paths[i].size())});
            for (const int32_t node : paths[i]) {
                tokens.push_back(new_tokens[i][node]);
            }
        }
        engine_->commit(committed);
    }

  private:
    int below(int n) { return static_cast<int>(random_() % n); }

    static Tokens with_path(Tokens tokens, const Tokens & nodes, const Tokens & parents, int node) {
        Tokens path;
        for (; node >= 0; node = parents[node]) {
            path.insert(path.begin(), nodes[node]);
        }
        tokens.insert(tokens.end(), path.begin(), path.end());
        return tokens;
    }

    void check(int i, int64_t row, const Tokens & tokens) {
        Logits found(N_VOCAB), expected(N_VOCAB);
        sequences_[i]->logits({row}, found.data());
        alone_.reset();
        prefill(alone_, tokens.data(), static_cast<int64_t>(tokens.size()));
        alone_.logits({0}, expected.data());
        for (int token = 0; token < N_VOCAB; ++token) {
            CHECK(std::fabs(found[token] - expected[token]) < 1e-4f);
        }
    }

    std::shared_ptr<Engine> engine_;
    Sequence alone_;
    std::vector<std::unique_ptr<Sequence>> sequences_;
    Tokens tokens_[N_SEQUENCES];
    std::mt19937 random_;
};

// Verifies stay pending while other sequences run, and are committed in any order.
void open_verifies_wait(const std::shared_ptr<const Model> & model, DeltaForm form) {
    auto engine = engine_of(model, form, 2);
    Sequence first(engine), second(engine), alone(engine_of(model, form, 1));
    const Tokens tokens = {3, 1, 4, 1, 5, 9, 2, 6};
    prefill(first, tokens.data(), 3);
    prefill(second, tokens.data() + 3, 2);
    verify(first, tokens.data() + 3, nullptr, 4);
    verify(second, tokens.data() + 5, nullptr, 3);
    CHECK(contains(error_of([&] { first.argmax(0); }), "these logits are gone"));
    CHECK(contains(error_of([&] { engine->reserve_verify(30); }), "commit it first"));
    commit(first, nullptr, 4);
    commit(second, nullptr, 1);
    Logits found(N_VOCAB), expected(N_VOCAB);
    prefill(first, tokens.data() + 7, 1);
    first.logits({0}, found.data());
    prefill(alone, tokens.data(), 8);
    alone.logits({0}, expected.data());
    for (int token = 0; token < N_VOCAB; ++token) {
        CHECK(std::fabs(found[token] - expected[token]) < 1e-4f);
    }
    // Overwrites the node updates of the verify of `first`.
    verify(second, tokens.data(), nullptr, 8);
    commit(second, nullptr, 0);
    CHECK(second.position() == 3);
}

} // namespace

int main() {
    for (const char * name : {"small-llama", "small-qwen35"}) {
        const auto model = std::make_shared<const Model>(model_path(name), on_cpu());
        for (const DeltaForm form : {DeltaForm::OWN, DeltaForm::FUSED, DeltaForm::STOCK}) {
            Beside beside(model, form, static_cast<unsigned>(form));
            for (int step = 0; step < 40; ++step) {
                beside.step();
            }
            open_verifies_wait(model, form);
        }
    }
}
