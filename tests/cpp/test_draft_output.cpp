// Top-k selection of a draft's logits on a device, compared with selection on the host.
#include "draft/draft_output.h"

#include "check.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <random>
#include <set>

using namespace dfl;

namespace {

constexpr int64_t N_DRAFT = 5;
enum class Where { HOST, DEVICE, DEVICE_BY_BLOCKS };

// n_threads: threads of our own kernel for sums of exponentials; 0: ggml computes them.
Draft select(const std::vector<float> & logits, int64_t k, Where where, int n_threads = 0) {
    const int64_t n_vocab = static_cast<int64_t>(logits.size()) / N_DRAFT;
    Backend backend(cpu_device(), 1, {});
    CachedGraph cached;
    cached.shape.n_top = where == Where::HOST ? 0 : k;
    cached.shape.top_by_blocks = where == Where::DEVICE_BY_BLOCKS;
    cached.cpu_nodes.n_threads = n_threads;
    cached.ctx.reset(
        ggml_init({99 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true}));
    cached.graph = ggml_new_graph(cached.ctx.get());
    ggml_tensor * input = make_input(cached.ctx.get(), GGML_TYPE_F32, n_vocab, N_DRAFT, "logits");
    add_draft_output(cached, input);
    ggml_gallocr_ptr arena(ggml_gallocr_new(backend.default_buffer_type()));
    CHECK(ggml_gallocr_alloc_graph(arena.get(), cached.graph));
    ggml_backend_tensor_set(input, logits.data(), 0, ggml_nbytes(input));
    backend.compute(cached.graph);
    return read_draft(cached, k, backend);
}

void check_same(const std::vector<float> & logits, int64_t k, Where where, int n_threads = 0) {
    const int64_t n_vocab = static_cast<int64_t>(logits.size()) / N_DRAFT;
    const Draft draft = select(logits, k, where, n_threads);
    CHECK(static_cast<int64_t>(draft.best.size()) == k * N_DRAFT);
    CHECK(static_cast<int64_t>(draft.log_sum_exp.size()) == N_DRAFT);
    for (int64_t i = 0; i < N_DRAFT; ++i) {
        const float * row = logits.data() + i * n_vocab;
        std::vector<Candidate> all;
        double sum = 0;
        for (int32_t token = 0; token < n_vocab; ++token) {
            all.push_back({token, row[token]});
            sum += std::exp(static_cast<double>(row[token]));
        }
        std::sort(all.begin(), all.end(), is_better);
        for (int64_t j = 0; j < k; ++j) {
            CHECK(draft.best[i * k + j].token == all[j].token);
            CHECK(draft.best[i * k + j].logit == all[j].logit);
        }
        CHECK(std::fabs(draft.log_sum_exp[i] - std::log(sum)) < 1e-4);
    }
}

} // namespace

int main() {
    std::mt19937 random(3);
    std::normal_distribution<float> noise(0, 4);
    // Vocabulary sizes that give no blocks, one level of blocks, and two levels.
    for (const int64_t n_vocab : {777, 6144, 65536}) {
        std::vector<float> logits(n_vocab * N_DRAFT);
        std::generate(logits.begin(), logits.end(), [&] { return noise(random); });
        logits[2 * n_vocab + 500] = 60;
        for (const int64_t k : {1, 2, 32, 776}) {
            check_same(logits, k, Where::HOST);
            check_same(logits, k, Where::HOST, /*n_threads =*/1);
            check_same(logits, k, Where::DEVICE);
            check_same(logits, k, Where::DEVICE_BY_BLOCKS);
        }
    }
    // Equal logits: any tokens may be chosen, but none twice.
    const Draft ties =
        select(std::vector<float>(6144 * N_DRAFT, 3.0f), 32, Where::DEVICE_BY_BLOCKS);
    for (int64_t i = 0; i < N_DRAFT; ++i) {
        std::set<int32_t> tokens;
        for (int64_t j = 0; j < 32; ++j) {
            CHECK(ties.best[i * 32 + j].logit == 3.0f);
            tokens.insert(ties.best[i * 32 + j].token);
        }
        CHECK(tokens.size() == 32);
    }

    for (const int64_t n_numbers : {500, 40, 7}) {
        std::vector<float> logits(777 * N_DRAFT, NAN);
        for (int64_t i = 0; i < n_numbers; ++i) {
            logits[(i * 13) % 777] = noise(random);
        }
        std::vector<float> expected;
        std::copy_if(logits.begin(), logits.begin() + 777, std::back_inserter(expected),
                     [](float x) { return !std::isnan(x); });
        std::sort(expected.rbegin(), expected.rend());
        const Draft found = select(logits, 32, Where::HOST);
        for (int64_t j = 0; j < 32; ++j) {
            const float logit = found.best[j].logit;
            CHECK(j < n_numbers ? logit == expected[j] : std::isnan(logit));
        }
    }
    const Draft nothing =
        select(std::vector<float>(65536 * N_DRAFT, NAN), 32, Where::DEVICE_BY_BLOCKS);
    for (const Candidate & candidate : nothing.best) {
        CHECK(candidate.token >= 0 && candidate.token < 65536);
        CHECK(!std::isfinite(candidate.logit));
    }
}
