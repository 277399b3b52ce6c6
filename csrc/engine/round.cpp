// A speculative round: draft, verify, commit.
#include "engine/sequence.h"
#include "error.h"
#include "graph/path_inputs.h"
#include "layers/delta_net.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace dfl {

void Sequence::check_no_open_verify() const {
    DFL_CHECK(open_.n == 0, DFL_STATUS_ARGUMENT, "a verify of %lld rows waits for its commit",
              (long long)open_.n);
}

Draft Sequence::draft(int32_t last_token, int64_t n_draft, int64_t k, bool log_sum_exp) {
    check_no_open_verify();
    DFL_CHECK(draft_ != nullptr, DFL_STATUS_ARGUMENT, "the engine has no drafter");
    const Drafter & drafter = draft_->drafter();
    const int64_t most = draft_->max_block() - 1;
    DFL_CHECK(n_draft >= 1 && n_draft <= most, DFL_STATUS_ARGUMENT,
              "%lld drafted tokens: the drafter gives 1 to %lld", (long long)n_draft,
              (long long)most);
    const int64_t n_choices = drafter.head(engine_->model()).n_out();
    DFL_CHECK(k >= 1 && k <= n_choices, DFL_STATUS_ARGUMENT,
              "%lld candidates: the drafter chooses among %lld tokens", (long long)k,
              (long long)n_choices);
    check_tokens(&last_token, 1, position());
    DFL_CHECK(n_draft < engine_->n_ctx() - position(), DFL_STATUS_ARGUMENT,
              "%lld drafted tokens and the one before them after %lld do not fit into a context of "
              "%lld",
              (long long)n_draft, (long long)position(), (long long)engine_->n_ctx());
    last_ = nullptr;
    Draft draft = draft_->run_block(engine_->graphs(), last_token, static_cast<int32_t>(position()),
                                    n_draft, k, log_sum_exp);
    bool is_finite = std::all_of(draft.log_sum_exp.begin(), draft.log_sum_exp.end(),
                                 [](float sum) { return std::isfinite(sum); });
    for (Candidate & candidate : draft.best) {
        is_finite = is_finite && std::isfinite(candidate.logit);
        candidate.token = drafter.token(candidate.token);
    }
    if (!is_finite) {
        draft_->clear(); // so that it may recover: what it saw is as suspect as what it says
    }
    return draft;
}

void Sequence::verify(const int32_t * tokens, const int32_t * parents, int64_t n) {
    check_no_open_verify();
    check_tokens(tokens, n, position());
    DFL_CHECK(n <= engine_->verify_rows(), DFL_STATUS_ARGUMENT,
              "%lld rows to verify, there is room for %lld: reserve more, up to %lld", (long long)n,
              (long long)engine_->verify_rows(), (long long)Engine::MAX_VERIFY);
    const Tree tree(tokens, parents, n);
    Pass pass = plan_verify(tree);
    last_ = &run(pass, pass.n_rows(), /*inject =*/false);
    first_out_ = 0;
    n_out_rows_ = n;
    open_ = std::move(pass);
}

void Sequence::commit(int64_t n) {
    DFL_CHECK(n >= 0 && n <= open_.n, DFL_STATUS_ARGUMENT,
              "%lld rows to commit, the open verify has %lld", (long long)n, (long long)open_.n);
    std::vector<int32_t> nodes(n);
    std::iota(nodes.begin(), nodes.end(), 0);
    commit_path(nodes.data(), n);
}

void Sequence::commit_path(const int32_t * nodes, int64_t n) {
    DFL_CHECK(n >= 0 && n <= open_.n, DFL_STATUS_ARGUMENT,
              "a path of %lld nodes, the open verify has %lld", (long long)n, (long long)open_.n);
    open_.tree.check_path(nodes, n);
    if (open_.n == 0) {
        return; // after an interruption callers cannot know whether their verify still waits
    }
    open_.finite = finite_rows();
    last_ = nullptr; // the promotion below reuses the arena its logits lie in
    if (n > 0 && engine_->recurs()) {
        try {
            engine_->promote_along(nodes, n);
        } catch (...) {
            reset(); // some layers' states may have moved on
            throw;
        }
    }
    std::vector<int64_t> feature_rows;
    for (int64_t i = 0; i < n; ++i) {
        int64_t cell = open_.cells[nodes[i]];
        if (kv_.is_host()) {
            // CPU kernels sum over cells as they lie: in the order of plain decoding the sums are
            // its own. Cells of a verify ascend and a node comes after its parent, so rows only
            // move down, into cells whose rows have moved or are dropped.
            kv_.copy_row(cell, open_.cells[i]);
            cell = open_.cells[i];
        }
        kv_.cells().own(cell, SEQUENCE, open_.positions[nodes[i]]);
        if (draft_) {
            feature_rows.push_back(open_.feature_rows[nodes[i]]);
        }
    }
    if (draft_) {
        draft_->keep(feature_rows, static_cast<int32_t>(position()));
    }
    for (int64_t i = 0; i < n; ++i) {
        tokens_.push_back(open_.tree.token(nodes[i]));
    }
    if (n > 0 && open_.finite[nodes[n - 1]]) {
        n_proven_ = position();
    }
    close_verify();
}

void Sequence::close_verify() {
    if (open_.n == 0) {
        return;
    }
    if (open_.finite.empty()) {
        open_.finite = finite_rows();
        open_.finite.resize(open_.n, false);
    }
    for (size_t i = 0; i < open_.cells.size(); ++i) {
        const int64_t cell = open_.cells[i];
        if (kv_.cells().sequence(cell) == SEQUENCE) {
            continue;
        }
        if (!open_.finite[static_cast<int64_t>(i) < open_.n ? i : 0]) { // padding copies the root
            kv_.clear_cell(cell);
        }
        kv_.cells().release(cell);
    }
    open_ = {};
}

void Engine::promote_along(const int32_t * path, int64_t n) {
    for (int64_t done = 0; done < n; done += MOST_STEPS) {
        promote_state(path, done, std::min(n - done, MOST_STEPS));
    }
}

LiveGraph & Engine::promote_graph(int64_t n_accepted) {
    const int64_t layers = model_->hparams().n_recurrent();
    const int64_t before = model_->hparams().recurrent.d_conv - 1;
    BatchShape shape;
    shape.kind = GraphKind::PROMOTE;
    shape.n_rows = sizes_.path(n_accepted);
    shape.walks = walks_;
    shape.by_paths = !fused_;
    return graphs_.get(shape, [&](LiveGraph & fresh) {
        ggml_context * ctx = fresh.ctx.get();
        fresh.draft.path = make_input(ctx, GGML_TYPE_I32, shape.n_rows, layers, "path");
        fresh.draft.on_path = make_input(ctx, GGML_TYPE_F32, 1, shape.n_rows, "on_path");
        fresh.draft.conv_rows = make_input(ctx, GGML_TYPE_I32, before, layers, "conv_rows");
        if (shape.by_paths) {
            make_path_inputs(fresh, model_->hparams().recurrent);
        }
        Build b = {ctx, fresh.graph, fresh.cpu_nodes, model_->hparams(), model_->weights(),
                   kv_, recurrent_,  shape,           fresh.in};
        for (const auto & part : recurrent_.parts()) {
            promote(b, *part, fresh.draft.path, fresh.draft.on_path, fresh.draft.conv_rows);
        }
    });
}

void Engine::promote_state(const int32_t * path, int64_t first, int64_t n_accepted) {
    const int64_t layers = model_->hparams().n_recurrent();
    const int64_t before = model_->hparams().recurrent.d_conv - 1;
    LiveGraph & live = promote_graph(n_accepted);
    const int64_t n_steps = live.shape.n_rows;
    const int32_t * nodes = path + first;
    live.write<int32_t>(live.draft.path, [&](int32_t * data) {
        for (int64_t i = 0; i < n_steps * layers; ++i) {
            const int64_t step = i % n_steps;
            data[i] = nodes[step < n_accepted ? step : 0];
        }
    });
    live.write<float>(live.draft.on_path, [&](float * data) {
        for (int64_t i = 0; i < n_steps; ++i) {
            data[i] = i < n_accepted ? 1.0f : 0.0f;
        }
    });
    live.write<int32_t>(live.draft.conv_rows, [&](int32_t * data) {
        for (int64_t i = 0; i < before * layers; ++i) {
            // Of the inputs committed before the verify, then the path's, the last.
            const int64_t at = first + n_accepted + i % before;
            data[i] = static_cast<int32_t>(at < before ? at : before + path[at - before]);
        }
    });
    write_path_inputs(live, model_->hparams().recurrent, {});
    graphs_.compute(live);
}

} // namespace dfl
