// A session from the inside: micro-batches, checkpoints, cancellation, bad arguments.
#include "engine/session.h"

#include "check.h"
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

Session make(const std::shared_ptr<const Model> & model, int64_t n_ubatch,
             ggml_type type = GGML_TYPE_F32) {
    SessionParams params;
    params.n_ctx = 40;
    params.n_ubatch = n_ubatch;
    params.n_threads = 1;
    params.type_k = params.type_v = type;
    return Session(model, params);
}

Logits all_logits(Session & session) {
    const std::vector<int32_t> tokens = prompt();
    Logits logits(N_TOKENS * TINY_VOCAB);
    session.prefill(tokens.data(), N_TOKENS, logits.data(), nullptr);
    return logits;
}

Logits next(Session & session, int32_t token) {
    session.prefill(&token, 1, nullptr, nullptr);
    Logits logits(TINY_VOCAB);
    session.logits(0, logits.data());
    CHECK(session.argmax(0) == std::max_element(logits.begin(), logits.end()) - logits.begin());
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
    Session whole = make(model, 40);
    const Logits expected = all_logits(whole);
    for (int64_t n_ubatch : {1, 2, 7, 29, 30}) {
        Session session = make(model, n_ubatch);
        CHECK(distance(all_logits(session), expected) < 1e-4f);
        session.reset();
        CHECK(distance(all_logits(session), expected) < 1e-4f);
    }
    Session half = make(model, 7, GGML_TYPE_F16);
    CHECK(distance(all_logits(half), expected) < 0.1f);
}

void checkpoints_go_back(const std::shared_ptr<const Model> & model) {
    Session session = make(model, 8);
    const std::vector<int32_t> tokens = prompt();
    session.prefill(tokens.data(), 11, nullptr, nullptr);
    const Checkpoint checkpoint = session.take();
    const Logits expected = next(session, 5);
    for (int detour = 0; detour < 3; ++detour) {
        session.prefill(tokens.data() + detour, 9, nullptr, nullptr);
        CHECK(session.holds(checkpoint));
        session.restore(checkpoint);
        CHECK(session.position() == 11);
        CHECK(error_of([&] { session.argmax(0); }) == "row 0: the last pass has 0 rows");
        CHECK(next(session, 5) == expected);
    }
    session.reset();
    CHECK(!session.holds(checkpoint));
    CHECK(contains(error_of([&] { session.restore(checkpoint); }), "checkpoint of 11 tokens"));
}

// Of another model it lacks recurrent bytes, or has too many; of another session it is of other
// cells.
void checkpoints_of_others_are_refused(const std::shared_ptr<const Model> & model,
                                       const std::shared_ptr<const Model> & other) {
    const std::vector<int32_t> tokens = prompt();
    Session session = make(model, 8);
    session.prefill(tokens.data(), 11, nullptr, nullptr);
    for (const auto & taken_of : {model, other}) {
        Session another = make(taken_of, 8);
        another.prefill(tokens.data(), 11, nullptr, nullptr);
        const Checkpoint checkpoint = another.take();
        CHECK(!session.holds(checkpoint));
        CHECK(contains(error_of([&] { session.restore(checkpoint); }),
                       "the checkpoint of 11 tokens was taken of another session"));
        CHECK(another.holds(checkpoint));
    }
    Session fresh = make(model, 8);
    fresh.prefill(tokens.data(), 11, nullptr, nullptr);
    CHECK(next(session, 5) == next(fresh, 5));
}

void cancelled_between_micro_batches(const std::shared_ptr<const Model> & model) {
    Session session = make(model, 8), fresh = make(model, 8);
    const std::vector<int32_t> tokens = prompt();
    const std::string error = error_of([&] {
        session.prefill(tokens.data(), N_TOKENS, nullptr,
                        [](int64_t done, int64_t) { return done >= 16; });
    });
    CHECK(error == "cancelled after 16 of 30 tokens");
    fresh.prefill(tokens.data(), 16, nullptr, nullptr);
    CHECK(next(session, 3) == next(fresh, 3));
}

void bad_arguments_change_nothing(const std::shared_ptr<const Model> & model) {
    Session session = make(model, 8);
    const std::vector<int32_t> zeros(41, 0);
    const int32_t bad[] = {1, TINY_VOCAB};
    CHECK(contains(error_of([&] { session.prefill(zeros.data(), 0, nullptr, nullptr); }),
                   "no tokens"));
    CHECK(contains(error_of([&] { session.prefill(zeros.data(), 41, nullptr, nullptr); }),
                   "41 tokens after 0 do not fit into a context of 40"));
    CHECK(contains(error_of([&] { session.prefill(bad, 2, nullptr, nullptr); }), "token id 50"));
    CHECK(session.position() == 0);
    CHECK(contains(error_of([&] { make(model, 0); }), "n_ubatch is 0, expected 1 to"));
    CHECK(contains(error_of([&] { make(model, 8, GGML_TYPE_Q8_0); }), "valid (K/V): f32/f32"));
}

// Packed weights: a row has the same bits alone and among others, on two threads and on one.
void rows_of_packed_weights_are_equal(const std::string & path) {
    const auto model = std::make_shared<const Model>(path, ModelParams{0, {}, nullptr});
    if (cpu::packed_product(GGML_TYPE_Q8_0) == nullptr) {
        return;
    }
    CHECK(model->weights().packed.size() >= 7);
    const std::vector<int32_t> tokens = prompt();
    Session serial = make(model, 8);
    serial.prefill(tokens.data(), 10, nullptr, nullptr);
    std::vector<Logits> expected;
    for (int i = 10; i < 26; ++i) {
        expected.push_back(next(serial, tokens[i]));
    }
    SessionParams params;
    params.n_ctx = 40;
    params.n_threads = 2;
    params.type_k = params.type_v = GGML_TYPE_F32;
    Session session(model, params);
    session.reserve_verify(16);
    session.prefill(tokens.data(), 10, nullptr, nullptr);
    for (int n : {16, 13, 4, 2, 1}) {
        session.verify(tokens.data() + 10, nullptr, n);
        Logits row(TINY_VOCAB);
        for (int i = 0; i < n; ++i) {
            session.logits(i, row.data());
            CHECK(row == expected[i]);
        }
        session.commit(0);
    }
}

} // namespace

int main() {
    TemporaryFolder folder;
    const std::string path = folder.file("tiny.gguf"), other = folder.file("other.gguf");
    write_tiny_llama(path);
    write_tiny_qwen35(other);
    checkpoints_of_others_are_refused(std::make_shared<const Model>(path, on_cpu()),
                                      std::make_shared<const Model>(other, on_cpu()));
    checkpoints_of_others_are_refused(std::make_shared<const Model>(other, on_cpu()),
                                      std::make_shared<const Model>(path, on_cpu()));
    for (auto write : {write_tiny_llama, write_tiny_qwen35}) {
        write(path);
        const auto model = std::make_shared<const Model>(path, on_cpu());
        micro_batches_change_nothing(model);
        checkpoints_go_back(model);
        cancelled_between_micro_batches(model);
        bad_arguments_change_nothing(model);
    }
    write_quantized_qwen35(path);
    rows_of_packed_weights_are_equal(path);
}
