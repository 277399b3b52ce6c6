// What is read of a draft: the device's selection against the host's.
#include "draft_output.h"

#include "check.h"

#include <algorithm>
#include <cmath>
#include <random>

using namespace dfl;

namespace {

constexpr int64_t N_VOCAB = 777, N_DRAFT = 5;

// n_threads: of own code that sums; 0: ggml does.
Draft select(const std::vector<float> & logits, int64_t k, bool on_device, bool log_sum_exp,
             int n_threads = 0) {
    Backend backend(cpu_device(), 1, {});
    LiveGraph live;
    live.shape.n_top = on_device ? k : 0;
    live.shape.log_sum_exp = log_sum_exp;
    live.cpu_nodes.n_threads = n_threads;
    live.ctx.reset(ggml_init({32 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true}));
    live.graph = ggml_new_graph(live.ctx.get());
    ggml_tensor * input = make_input(live.ctx.get(), GGML_TYPE_F32, N_VOCAB, N_DRAFT, "logits");
    add_draft_output(live, input);
    ggml_gallocr_ptr arena(ggml_gallocr_new(backend.default_buffer_type()));
    CHECK(ggml_gallocr_alloc_graph(arena.get(), live.graph));
    ggml_backend_tensor_set(input, logits.data(), 0, ggml_nbytes(input));
    backend.compute(live.graph);
    return read_draft(live, k, backend);
}

void check_same(const std::vector<float> & logits, int64_t k, bool on_device, int n_threads = 0) {
    const Draft draft = select(logits, k, on_device, true, n_threads);
    CHECK(static_cast<int64_t>(draft.best.size()) == k * N_DRAFT);
    CHECK(static_cast<int64_t>(draft.log_sum_exp.size()) == N_DRAFT);
    for (int64_t i = 0; i < N_DRAFT; ++i) {
        const float * row = logits.data() + i * N_VOCAB;
        std::vector<Candidate> all;
        double sum = 0;
        for (int32_t token = 0; token < N_VOCAB; ++token) {
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
    CHECK(select(logits, k, on_device, false).log_sum_exp.empty());
}

} // namespace

int main() {
    std::mt19937 random(3);
    std::normal_distribution<float> noise(0, 4);
    std::vector<float> logits(N_VOCAB * N_DRAFT);
    std::generate(logits.begin(), logits.end(), [&] { return noise(random); });
    logits[2 * N_VOCAB + 500] = 60; // nearly all of its row
    for (const int64_t k : {1, 2, 32, 776}) {
        check_same(logits, k, /*on_device =*/false);
        check_same(logits, k, /*on_device =*/false, /*n_threads =*/1);
        check_same(logits, k, /*on_device =*/true);
    }
}
