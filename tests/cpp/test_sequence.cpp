// A sequence from the inside: micro-batches, ways back, bad arguments, its place in
// an engine.
#include "engine/sequence.h"

#include "check.h"
#include "passes.h"
#include "tiny_model.h"

#include <cmath>
#include <cstring>

using namespace dfl;

namespace {

constexpr int N_TOKENS = 30;
using Logits = std::vector<float>;

std::vector<int32_t> prompt() {
    std::vector<int32_t> tokens(N_TOKENS);
    for (int i = 0; i < N_TOKENS; ++i) {
        tokens[i] = (7 + 13 * i * i) % TINY_VOCAB;
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
    Logits logits(N_TOKENS * TINY_VOCAB);
    prefill(sequence, tokens.data(), N_TOKENS, logits.data());
    return logits;
}

Logits next(Sequence & sequence, int32_t token) {
    prefill(sequence, &token, 1);
    Logits logits(TINY_VOCAB);
    sequence.logits(0, logits.data());
    CHECK(sequence.argmax(0) == std::max_element(logits.begin(), logits.end()) - logits.begin());
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

void back_to_a_prefix(const std::shared_ptr<const Model> & model) {
    Sequence sequence = make(model, 8);
    const std::vector<int32_t> tokens = prompt();
    prefill(sequence, tokens.data(), 11);
    const std::shared_ptr<Prefix> prefix = sequence.snapshot();
    const Logits expected = next(sequence, 5);
    for (int detour = 0; detour < 3; ++detour) {
        prefill(sequence, tokens.data() + detour, 9);
        sequence.restore(*prefix, 11);
        CHECK(sequence.position() == 11);
        CHECK(contains(error_of([&] { sequence.argmax(0); }), "these rows are gone"));
        CHECK(next(sequence, 5) == expected);
    }
}

// Prompts that begin alike, with verifies left open between them: what is left of one where the
// next begins is what a fresh sequence computes.
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
        const int64_t other = below(2 * N_TOKENS); // past the end: none
        if (other < static_cast<int64_t>(tokens.size())) {
            tokens[other] = (tokens[other] + 1 + step % 2) % TINY_VOCAB;
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
        Logits found(TINY_VOCAB), expected(TINY_VOCAB);
        sequence.logits(0, found.data());
        fresh.logits(0, expected.data());
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

void bad_arguments_change_nothing(const std::shared_ptr<const Model> & model) {
    Sequence sequence = make(model, 8);
    const std::vector<int32_t> zeros(41, 0);
    const int32_t bad[] = {1, TINY_VOCAB};
    CHECK(contains(error_of([&] { prefill(sequence, zeros.data(), 0); }), "no tokens"));
    CHECK(contains(error_of([&] { prefill(sequence, zeros.data(), 41); }),
                   "41 tokens after 0 do not fit into a context of 40"));
    CHECK(contains(error_of([&] { prefill(sequence, bad, 2); }), "token id 50"));
    CHECK(sequence.position() == 0);
    CHECK(contains(error_of([&] { make(model, 0); }), "n_ubatch is 0, expected 1 to"));
    CHECK(contains(error_of([&] { make(model, 8, GGML_TYPE_Q8_0); }), "valid (K/V): f32/f32"));
}

// One more than there are places is refused, and finds nothing of the first afterwards.
void as_many_sequences_as_places(const std::shared_ptr<const Model> & model) {
    EngineParams params;
    params.n_ctx = 40;
    params.n_ubatch = 8;
    params.n_threads = 1;
    params.type_k = params.type_v = GGML_TYPE_F32;
    auto engine = std::make_shared<Engine>(model, params);
    const std::vector<int32_t> tokens = prompt();
    auto first = std::make_unique<Sequence>(engine);
    CHECK(error_of([&] { Sequence second(engine); }) ==
          "the engine has 1 sequence already, and holds 1 at a time (n_parallel)");
    engine->reserve_verify(4);
    prefill(*first, tokens.data() + 3, 20);
    verify(*first, tokens.data(), nullptr, 4); // stays open
    CHECK(error_of([&] { engine->reserve_verify(8); }) ==
          "a verify of 4 rows waits for its commit");
    first.reset();

    Sequence second(engine), fresh = make(model, 8);
    engine.reset(); // the sequence keeps it
    CHECK(second.position() == 0 && second.engine().kv().cells().n_unclaimed() == 256);
    CHECK(all_logits(second) == all_logits(fresh));
    second.engine().reserve_verify(8);
    CHECK(contains(error_of([&] { second.argmax(0); }), "these rows are gone"));
}

// Packed weights: a row has the same bits alone and among others, on two threads and on one.
void rows_of_packed_weights_are_equal(const std::string & path) {
    const auto model = std::make_shared<const Model>(path, ModelParams{0, {}, nullptr});
    if (cpu::packed_product(GGML_TYPE_Q8_0) == nullptr) {
        return;
    }
    CHECK(model->weights().packed.size() >= 7);
    const std::vector<int32_t> tokens = prompt();
    Sequence serial = make(model, 8);
    prefill(serial, tokens.data(), 10);
    std::vector<Logits> expected;
    for (int i = 10; i < 26; ++i) {
        expected.push_back(next(serial, tokens[i]));
    }
    EngineParams params;
    params.n_ctx = 40;
    params.n_threads = 2;
    params.type_k = params.type_v = GGML_TYPE_F32;
    Sequence sequence(std::make_shared<Engine>(model, params));
    sequence.engine().reserve_verify(16);
    prefill(sequence, tokens.data(), 10);
    for (int n : {16, 13, 4, 2, 1}) {
        verify(sequence, tokens.data() + 10, nullptr, n);
        Logits row(TINY_VOCAB);
        for (int i = 0; i < n; ++i) {
            sequence.logits(i, row.data());
            CHECK(row == expected[i]);
        }
        commit(sequence, nullptr, 0);
    }
}

} // namespace

int main() {
    TemporaryFolder folder;
    const std::string path = folder.file("tiny.gguf");
    for (auto write : {write_tiny_llama, write_tiny_qwen35}) {
        write(path);
        const auto model = std::make_shared<const Model>(path, on_cpu());
        micro_batches_change_nothing(model);
        back_to_a_prefix(model);
        taken_back_to_any_prompt(model);
        bad_arguments_change_nothing(model);
        as_many_sequences_as_places(model);
    }
    write_quantized_qwen35(path);
    rows_of_packed_weights_are_equal(path);
}
