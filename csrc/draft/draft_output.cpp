#include "draft/draft_output.h"

#include "cpu/rows/row_kernel.h"
#include "layers/cpu_ops/float_rows.h"

#include <algorithm>
#include <cmath>

namespace dfl {

// A graph node that computes the log-sum-exp of each row of logits in our own CPU code.
class LogSumExp : public CpuNode {
  public:
    void compute(ggml_tensor * dst, int ith, int nth) override {
        const ggml_tensor * logits = dst->src[0];
        for (int64_t row = ith; row < dst->ne[0]; row += nth) {
            static_cast<float *>(dst->data)[row] =
                cpu::row_kernel()->log_sum_exp(row_of(logits, row), logits->ne[0]);
        }
    }
};

void add_draft_output(CachedGraph & cached, ggml_tensor * logits) {
    ggml_context * ctx = cached.ctx.get();
    cached.logits = add_output(cached, logits);
    const int64_t n_draft = logits->ne[1], k = cached.shape.n_top;
    ggml_tensor * probabilities = nullptr;
    if (cached.cpu_nodes.n_threads > 0) {
        cached.top.log_sum_exp =
            add_output(cached, add_cpu_node(ctx, cached.cpu_nodes, GGML_TYPE_F32, n_draft, 1,
                                            {logits}, std::make_unique<LogSumExp>()));
    } else {
        // The log-sum-exp is logit - ln(p) of any token; the best token's p cannot underflow.
        probabilities = add_output(cached, ggml_soft_max(ctx, logits));
        cached.top.probabilities = probabilities;
    }
    if (k == 0) {
        return;
    }
    add_top_rows(cached, logits);
    if (probabilities != nullptr) {
        cached.top.probabilities = add_result(cached, cached.top.rows.gather(ctx, probabilities));
    }
}

// Reads the device's selection, which is in any order, and sorts it.
static Draft read_selection(const CachedGraph & cached) {
    const int64_t n = cached.logits->ne[0], n_draft = cached.logits->ne[1], k = cached.shape.n_top;
    const TopRows & rows = cached.top.rows;
    std::vector<const int32_t *> blocks;
    for (const TopRows::Level & level : rows.levels) {
        blocks.push_back(cached.values<int32_t>(level.blocks));
    }
    const auto * last = cached.values<int32_t>(rows.last);
    const auto * logits = cached.values<float>(cached.top.logits);
    Draft draft;
    for (int64_t i = 0; i < k * n_draft; ++i) {
        // If logits are NaN, devices return any index.
        const int64_t row = std::clamp<int64_t>(rows.index_of(blocks, last, i), 0, n - 1);
        draft.best.push_back({static_cast<int32_t>(row), logits[i]});
    }
    for (int64_t i = 0; i < n_draft && cached.top.probabilities != nullptr; ++i) {
        const auto * first = cached.values<float>(cached.top.probabilities) + i * k;
        const int64_t top = std::max_element(first, first + k) - first;
        draft.log_sum_exp.push_back(logits[i * k + top] - std::log(first[top]));
    }
    for (int64_t i = 0; i < n_draft; ++i) {
        std::sort(draft.best.begin() + i * k, draft.best.begin() + (i + 1) * k, is_better);
    }
    return draft;
}

// Returns the values of a tensor, which are copied to `fetched` unless they are in host memory.
static const float * values_of(const ggml_tensor * x, const Backend & backend,
                               std::vector<float> & fetched) {
    if (backend.is_host()) {
        return static_cast<const float *>(x->data);
    }
    fetched.resize(ggml_nelements(x));
    backend.read(x, fetched.data(), 0, ggml_nbytes(x));
    return fetched.data();
}

Draft read_draft(const CachedGraph & cached, int64_t k, const Backend & backend) {
    if (cached.shape.n_top > 0) {
        return read_selection(cached);
    }
    std::vector<float> fetched, fetched_probabilities;
    const float * logits = values_of(cached.logits, backend, fetched);
    const float * probabilities =
        cached.top.probabilities != nullptr
            ? values_of(cached.top.probabilities, backend, fetched_probabilities)
            : nullptr;
    const int64_t n = cached.logits->ne[0];
    Draft draft;
    if (cached.top.log_sum_exp != nullptr) {
        const auto * sums = static_cast<const float *>(cached.top.log_sum_exp->data);
        draft.log_sum_exp.assign(sums, sums + cached.logits->ne[1]);
    }
    for (int64_t i = 0; i < cached.logits->ne[1]; ++i) {
        append_best(logits + i * n, n, k, draft.best);
        if (probabilities != nullptr) {
            const Candidate & top = draft.best[i * k];
            draft.log_sum_exp.push_back(top.logit - std::log(probabilities[i * n + top.token]));
        }
    }
    return draft;
}

bool selects_by_blocks(const Backend & backend) { return backend.is_cuda(); }

bool can_select_on_device(const Backend & backend, int64_t n, int64_t k) {
    if (backend.is_host()) {
        return false;
    }
    ggml_context_ptr ctx(ggml_init({8 * ggml_tensor_overhead(), nullptr, true}));
    ggml_tensor * logits = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, n, 1);
    ggml_tensor * numbers = clamp_to_finite(ctx.get(), logits);
    return backend.runs(numbers) &&
           backend.runs(ggml_top_k(ctx.get(), numbers, static_cast<int>(k)));
}

} // namespace dfl
