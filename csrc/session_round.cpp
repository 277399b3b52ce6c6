// A speculative round: draft, verify, commit.
#include "error.h"
#include "layers/delta_net.h"
#include "session.h"

#include <algorithm>
#include <cmath>

namespace dfl {

void Session::check_no_open_verify() const {
    DFL_CHECK(open_tokens_.empty(), DFL_STATUS_ARGUMENT,
              "a verify of %zu rows waits for its commit", open_tokens_.size());
}

void Session::check_drafts() const {
    DFL_CHECK(draft_ != nullptr, DFL_STATUS_ARGUMENT, "the session has no drafter");
}

std::vector<Candidate> Session::best_of_draft(const LiveGraph & live, int64_t k) const {
    const int64_t n_rows = live.logits->ne[0];
    const int64_t n_draft = live.logits->ne[1];
    std::vector<Candidate> best;
    if (live.argmax != nullptr && k == 1) {
        std::vector<int32_t> rows(n_draft);
        backend_.read(live.argmax, rows.data(), 0, n_draft * sizeof(int32_t));
        for (int64_t i = 0; i < n_draft; ++i) {
            const int64_t row = std::clamp<int64_t>(rows[i], 0, n_rows - 1);
            float logit = 0.0f;
            backend_.read(live.logits, &logit, (i * n_rows + row) * sizeof logit, sizeof logit);
            best.push_back({static_cast<int32_t>(row), logit});
        }
        return best;
    }
    std::vector<float> fetched;
    const float * logits = static_cast<const float *>(live.logits->data);
    if (!backend_.is_host()) {
        fetched.resize(n_rows * n_draft);
        backend_.read(live.logits, fetched.data(), 0, ggml_nbytes(live.logits));
        logits = fetched.data();
    }
    for (int64_t i = 0; i < n_draft; ++i) {
        append_best(logits + i * n_rows, n_rows, k, best);
    }
    return best;
}

std::vector<Candidate> Session::draft(int32_t last_token, int64_t n_draft, int64_t k) {
    check_no_open_verify();
    check_drafts();
    const Drafter & drafter = draft_->drafter();
    const int64_t most = std::min(drafter.draft().block_size, DraftState::MAX_VERIFY) - 1;
    DFL_CHECK(n_draft >= 1 && n_draft <= most, DFL_STATUS_ARGUMENT,
              "%lld drafted tokens: the drafter gives 1 to %lld", (long long)n_draft,
              (long long)most);
    const int64_t n_choices = drafter.head(*model_).weight->ne[1];
    DFL_CHECK(k >= 1 && k <= n_choices, DFL_STATUS_ARGUMENT,
              "%lld candidates: the drafter chooses among %lld tokens", (long long)k,
              (long long)n_choices);
    check_tokens(&last_token, 1);
    DFL_CHECK(n_draft < n_ctx() - position(), DFL_STATUS_ARGUMENT,
              "%lld drafted tokens and the one before them after %lld do not fit into a context of "
              "%lld",
              (long long)n_draft, (long long)position(), (long long)n_ctx());
    last_ = nullptr;
    const LiveGraph & live =
        draft_->run_block(graphs_, last_token, static_cast<int32_t>(position()), n_draft);
    std::vector<Candidate> best = best_of_draft(live, k);
    for (size_t i = 0; i < best.size(); ++i) {
        if (!std::isfinite(best[i].logit)) {
            draft_->clear(); // so that it may recover: what it saw is as suspect as what it says
            throw Error(DFL_STATUS_COMPUTE, format("the drafter's scores for drafted token %zu are "
                                                   "not finite numbers",
                                                   i / k + 1));
        }
        best[i].token = drafter.token(best[i].token);
    }
    return best;
}

void Session::verify(const int32_t * tokens, int64_t n) {
    check_no_open_verify();
    check_drafts();
    check_tokens(tokens, n);
    DFL_CHECK(n <= DraftState::MAX_VERIFY, DFL_STATUS_ARGUMENT, "%lld rows to verify, at most %lld",
              (long long)n, (long long)DraftState::MAX_VERIFY);
    LiveGraph & live = run(GraphKind::VERIFY, tokens, n, n, false, open_);
    open_tokens_.assign(tokens, tokens + n);
    last_ = &live;
    first_out_ = 0;
}

void Session::commit(int64_t n) {
    DFL_CHECK(n >= 0 && n <= (int64_t)open_tokens_.size(), DFL_STATUS_ARGUMENT,
              "%lld rows to commit, the open verify has %zu", (long long)n, open_tokens_.size());
    if (open_tokens_.empty()) {
        return; // after an interruption callers cannot know whether their verify still waits
    }
    last_ = nullptr; // the promotion below reuses the arena its logits lie in
    if (n > 0 && model_->hparams().n_recurrent() > 0) {
        try {
            promote_state(n);
        } catch (...) {
            reset(); // some layers' states may have moved on
            throw;
        }
    }
    release(open_, n);
    draft_->keep(open_.feature_rows, n, static_cast<int32_t>(position()));
    tokens_.insert(tokens_.end(), open_tokens_.begin(), open_tokens_.begin() + n);
    close_verify();
}

void Session::close_verify() {
    open_tokens_.clear();
    open_ = {};
}

void Session::promote_state(int64_t n_accepted) {
    const int64_t layers = model_->hparams().n_recurrent();
    const int64_t before = model_->hparams().recurrent.d_conv - 1;
    BatchShape shape;
    shape.kind = GraphKind::PROMOTE;
    shape.n_rows = row_bucket(n_accepted);
    LiveGraph & live = graphs_.get(shape, [&](LiveGraph & fresh) {
        ggml_context * ctx = fresh.ctx.get();
        fresh.draft.path = make_input(ctx, GGML_TYPE_I32, shape.n_rows, layers, "path");
        fresh.draft.on_path = make_input(ctx, GGML_TYPE_F32, 1, shape.n_rows, "on_path");
        fresh.draft.conv_rows = make_input(ctx, GGML_TYPE_I32, before, layers, "conv_rows");
        Build b = {ctx,   fresh.graph, model_->hparams(), model_->weights(), kv_, recurrent_,
                   shape, {}};
        promote(b, fresh.draft.path, fresh.draft.on_path, fresh.draft.conv_rows);
    });
    write_input<int32_t>(live.draft.path, [&](int32_t * data) {
        for (int64_t i = 0; i < shape.n_rows * layers; ++i) {
            const int64_t step = i % shape.n_rows;
            data[i] = static_cast<int32_t>(step < n_accepted ? step : 0);
        }
    });
    write_input<float>(live.draft.on_path, [&](float * data) {
        for (int64_t i = 0; i < shape.n_rows; ++i) {
            data[i] = i < n_accepted ? 1.0f : 0.0f;
        }
    });
    write_input<int32_t>(live.draft.conv_rows, [&](int32_t * data) {
        for (int64_t i = 0; i < before * layers; ++i) {
            data[i] = static_cast<int32_t>(n_accepted + i % before);
        }
    });
    backend_.compute(live.graph);
}

} // namespace dfl
