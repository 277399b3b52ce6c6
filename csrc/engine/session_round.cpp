// A speculative round: draft, verify, commit.
#include "engine/session.h"
#include "error.h"
#include "graph/path_inputs.h"
#include "layers/delta_net.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace dfl {

void Session::check_no_open_verify() const {
    DFL_CHECK(open_.n == 0, DFL_STATUS_ARGUMENT, "a verify of %lld rows waits for its commit",
              (long long)open_.n);
}

Draft Session::draft(int32_t last_token, int64_t n_draft, int64_t k, bool log_sum_exp) {
    check_no_open_verify();
    DFL_CHECK(draft_ != nullptr, DFL_STATUS_ARGUMENT, "the session has no drafter");
    const Drafter & drafter = draft_->drafter();
    const int64_t most = draft_->max_block() - 1;
    DFL_CHECK(n_draft >= 1 && n_draft <= most, DFL_STATUS_ARGUMENT,
              "%lld drafted tokens: the drafter gives 1 to %lld", (long long)n_draft,
              (long long)most);
    const int64_t n_choices = drafter.head(*model_).n_out();
    DFL_CHECK(k >= 1 && k <= n_choices, DFL_STATUS_ARGUMENT,
              "%lld candidates: the drafter chooses among %lld tokens", (long long)k,
              (long long)n_choices);
    check_tokens(&last_token, 1);
    DFL_CHECK(n_draft < n_ctx() - position(), DFL_STATUS_ARGUMENT,
              "%lld drafted tokens and the one before them after %lld do not fit into a context of "
              "%lld",
              (long long)n_draft, (long long)position(), (long long)n_ctx());
    last_ = nullptr;
    Draft draft = draft_->run_block(graphs_, last_token, static_cast<int32_t>(position()), n_draft,
                                    k, log_sum_exp);
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

void Session::reserve_verify_graphs(int64_t n) {
    BatchShape largest;
    largest.kind = GraphKind::VERIFY;
    largest.n_rows = largest.n_out = sizes_.verify_rows(n, model_->weights());
    largest.n_kv = kv_.cells().size();
    largest.walks = walks_;
    largest.by_paths = recurs_;
    pick_top(largest, selects_top(MAX_TOP) ? MAX_TOP : 0);
    graphs_.get(largest, [&](LiveGraph & live) { build_forward(live, draft_ != nullptr); });
    if (recurs_) {
        promote_graph(std::min(n, MOST_STEPS));
    }
}

void Session::reserve_verify(int64_t n) {
    check_no_open_verify();
    DFL_CHECK(n >= 1 && n <= MAX_VERIFY, DFL_STATUS_ARGUMENT,
              "room for verifies of %lld rows, expected 1 to %lld", (long long)n,
              (long long)MAX_VERIFY);
    if (n <= verify_rows_) {
        return;
    }
    last_ = nullptr;
    if (draft_) {
        draft_->grow(n, graphs_);
    }
    graphs_.clear(); // they use what is replaced here
    const int64_t n_rows = sizes_.verify_rows(n, model_->weights());
    recurrent_.reserve_trace(n_rows);
    kv_.masks().reserve(n_rows);
    reserve_verify_graphs(n);
    if (draft_) {
        draft_->reserve(graphs_);
    }
    verify_rows_ = n;
}

void Session::verify(const int32_t * tokens, const int32_t * parents, int64_t n) {
    check_no_open_verify();
    check_tokens(tokens, n);
    DFL_CHECK(n <= verify_rows_, DFL_STATUS_ARGUMENT,
              "%lld rows to verify, there is room for %lld: reserve more, up to %lld", (long long)n,
              (long long)verify_rows_, (long long)MAX_VERIFY);
    const Tree tree(tokens, parents, n);
    Pass pass = plan_verify(tree);
    last_ = &run(pass, pass.n_rows(), /*inject =*/false);
    first_out_ = 0;
    n_out_rows_ = n;
    open_ = std::move(pass);
}

void Session::commit(int64_t n) {
    DFL_CHECK(n >= 0 && n <= open_.n, DFL_STATUS_ARGUMENT,
              "%lld rows to commit, the open verify has %lld", (long long)n, (long long)open_.n);
    std::vector<int32_t> nodes(n);
    std::iota(nodes.begin(), nodes.end(), 0);
    commit_path(nodes.data(), n);
}

void Session::commit_path(const int32_t * nodes, int64_t n) {
    DFL_CHECK(n >= 0 && n <= open_.n, DFL_STATUS_ARGUMENT,
              "a path of %lld nodes, the open verify has %lld", (long long)n, (long long)open_.n);
    open_.tree.check_path(nodes, n);
    if (open_.n == 0) {
        return; // after an interruption callers cannot know whether their verify still waits
    }
    open_.finite = finite_rows();
    last_ = nullptr; // the promotion below reuses the arena its logits lie in
    if (n > 0 && recurs_) {
        try {
            for (int64_t done = 0; done < n; done += MOST_STEPS) {
                promote_state(nodes, done, std::min(n - done, MOST_STEPS));
            }
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

void Session::close_verify() {
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

LiveGraph & Session::promote_graph(int64_t n_accepted) {
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

void Session::promote_state(const int32_t * path, int64_t first, int64_t n_accepted) {
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
