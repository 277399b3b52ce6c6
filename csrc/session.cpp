#include "session.h"

#include "error.h"
#include "layers/delta_net.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace dfl {

static constexpr int32_t SEQUENCE = 0; // this timeline's name in the caches

static int64_t pad(int64_t n, int64_t to) {
    return (n + to - 1) / to * to;
}

static SessionParams checked(SessionParams params) {
    DFL_CHECK(params.n_ctx >= 1 && params.n_ctx <= (1 << 24), DFL_STATUS_ARGUMENT,
              "n_ctx is %lld, expected 1 to %d", (long long)params.n_ctx, 1 << 24);
    DFL_CHECK(params.n_ubatch >= 1 && params.n_ubatch <= 65536, DFL_STATUS_ARGUMENT,
              "n_ubatch is %lld, expected 1 to 65536", (long long)params.n_ubatch);
    DFL_CHECK(params.n_threads >= 0 && params.n_threads <= 1024, DFL_STATUS_ARGUMENT,
              "n_threads is %d, expected 0 to 1024", params.n_threads);
    params.n_ubatch = std::min(params.n_ubatch, params.n_ctx);
    return params;
}

static size_t max_nodes(const Model & model, const Drafter * drafter) {
    const Hparams & hp = model.hparams();
    size_t n = 512 + hp.n_layer() * (96 + 4 * hp.experts.n_used);
    if (drafter != nullptr) {
        n += drafter->hparams().n_layer() * 128;
    }
    return n;
}

static int64_t trace_nodes(const SessionParams & params) {
    return params.drafter ? DraftState::MAX_VERIFY : 0;
}

// K/V of the drafter as exact as the target's, where that is exact; else half precision.
static ggml_type draft_cache_type(const SessionParams & params) {
    return params.type_k == GGML_TYPE_F32 ? GGML_TYPE_F32 : GGML_TYPE_F16;
}

Session::Session(std::shared_ptr<const Model> model, const SessionParams & params)
    : model_(std::move(model)), params_(checked(params)),
      backend_(model_->on_gpu(), params_.n_threads, {}),
      kv_(model_->hparams(), backend_, params_.type_k, params_.type_v, pad(params_.n_ctx, 256)),
      recurrent_(model_->hparams(), backend_, 1, trace_nodes(params_)),
      graphs_(backend_, max_nodes(*model_, params_.drafter.get())) {
    tokens_.reserve(params_.n_ctx);
    if (params_.drafter) {
        draft_ = std::make_unique<DraftState>(params_.drafter, *model_, backend_,
                                              draft_cache_type(params_), params_.draft_window,
                                              params_.n_ubatch);
    }
    // The largest graph reserves the arena, so that memory runs out here or not at all.
    BatchShape largest;
    largest.n_rows = params_.n_ubatch;
    largest.n_kv = kv_.cells().size();
    largest.n_out = 1;
    largest.n_inject = draft_ && params_.n_ubatch > 1 ? params_.n_ubatch : 0;
    graphs_.get(largest, [&](LiveGraph & live) { build_forward(live, largest.n_inject > 0); });
    if (draft_) {
        BatchShape verify = largest;
        verify.kind = GraphKind::VERIFY;
        verify.n_rows = verify.n_out =
            std::min(params_.drafter->draft().block_size, DraftState::MAX_VERIFY);
        verify.n_inject = 0;
        graphs_.get(verify, [&](LiveGraph & live) { build_forward(live, true); });
    }
}

void Session::check_tokens(const int32_t * tokens, int64_t n) const {
    DFL_CHECK(n >= 1, DFL_STATUS_ARGUMENT, "there are no tokens to run");
    DFL_CHECK(n <= n_ctx() - position(), DFL_STATUS_ARGUMENT,
              "%lld tokens after %lld do not fit into a context of %lld", (long long)n,
              (long long)position(), (long long)n_ctx());
    for (int64_t i = 0; i < n; ++i) {
        DFL_CHECK(tokens[i] >= 0 && tokens[i] < model_->hparams().n_vocab, DFL_STATUS_ARGUMENT,
                  "token id %d is outside the vocabulary of %lld", tokens[i],
                  (long long)model_->hparams().n_vocab);
    }
}

// Steps grow with the context, so that a long answer does not rebuild its graph every few rounds.
int64_t Session::bucket(int64_t cells) const {
    int64_t step = 256;
    while (step * 16 < cells) {
        step *= 2;
    }
    return std::min(pad(cells, step), kv_.cells().size());
}

void Session::build_forward(LiveGraph & live, bool taps) {
    live.in = make_inputs(live.ctx.get(), model_->hparams(), live.shape);
    Build b = {live.ctx.get(), live.graph, model_->hparams(), model_->weights(), kv_, recurrent_,
               live.shape,     live.in};
    if (taps) {
        draft_->add_taps(live, b);
    }
    finish_logits(live, model_->arch().build(b), backend_);
    if (live.shape.n_inject > 0) {
        draft_->add_prefill_injection(live);
    }
}

void Session::set_inputs(LiveGraph & live, const int32_t * tokens, const Pass & pass) {
    const int64_t n = live.shape.n_rows;
    const auto first = static_cast<int32_t>(position());
    const GraphInputs & in = live.in;
    write_input<float>(in.embd, [&](float * data) { model_->embed(tokens, n, data); });
    if (in.positions != nullptr) {
        write_input<int32_t>(in.positions, [&](int32_t * data) {
            // M-RoPE: time, height and width are the position for text, the fourth is 0.
            for (int64_t i = 0; i < ggml_nelements(in.positions); ++i) {
                data[i] = i < 3 * n ? first + static_cast<int32_t>(i % n) : 0;
            }
        });
        write_input<int64_t>(in.cells, [&](int64_t * data) {
            std::copy(pass.cells.begin(), pass.cells.end(), data);
        });
    }
    for (const Mask & mask : in.masks) {
        write_input<ggml_fp16_t>(mask.tensor, [&](ggml_fp16_t * data) {
            for (int64_t i = 0; i < n; ++i) {
                kv_.cells().mask_row(SEQUENCE, first + static_cast<int32_t>(i), mask.rule.window,
                                     mask.rule.causal, data + i * live.shape.n_kv, live.shape.n_kv);
            }
        });
    }
    if (in.out_rows != nullptr) {
        write_input<int32_t>(in.out_rows,
                             [&](int32_t * data) { data[0] = static_cast<int32_t>(n - 1); });
    }
    if (live.draft.feature_rows != nullptr) {
        write_input<int64_t>(live.draft.feature_rows, [&](int64_t * data) {
            std::copy(pass.feature_rows.begin(), pass.feature_rows.end(), data);
        });
    }
    if (live.shape.n_inject > 0) {
        draft_->set_prefill_injection(live, first);
    }
}

void Session::release(const Pass & pass, int64_t first) {
    for (size_t i = first; i < pass.cells.size(); ++i) {
        kv_.cells().release(pass.cells[i]);
    }
}

LiveGraph & Session::run(GraphKind kind, const int32_t * tokens, int64_t n, int64_t n_out,
                         bool inject, Pass & pass) {
    last_ = nullptr;
    CellTable & table = kv_.cells();
    const bool to_ring = draft_ && (kind == GraphKind::VERIFY || n == 1);
    pass.cells = table.find_free(n);
    pass.feature_rows.clear();
    if (to_ring) {
        if (!draft_->ring_has_room(n)) {
            draft_->flush(graphs_);
        }
        pass.feature_rows = draft_->ring_rows(n);
    } else if (inject) {
        pass.feature_rows = draft_->prefill_rows(n);
    }
    for (int64_t i = 0; i < n; ++i) {
        table.own(pass.cells[i], SEQUENCE, static_cast<int32_t>(position() + i));
    }
    bool computing = false;
    try {
        BatchShape shape;
        shape.kind = kind;
        shape.n_rows = n;
        shape.first_seq = SEQUENCE;
        shape.n_kv = bucket(table.high());
        shape.n_out = n_out;
        shape.n_inject = !to_ring && inject ? n : 0;
        LiveGraph & live = graphs_.get(
            shape, [&](LiveGraph & fresh) { build_forward(fresh, !pass.feature_rows.empty()); });
        set_inputs(live, tokens, pass);
        computing = true;
        backend_.compute(live.graph);
        return live;
    } catch (...) {
        release(pass, 0);
        if (computing && kind == GraphKind::APPEND && model_->hparams().n_recurrent() > 0) {
            reset(); // a pass that died half way has advanced some layers' states
        } else if (draft_) {
            draft_->truncate(static_cast<int32_t>(position()));
        }
        throw;
    }
}

void Session::append(const int32_t * tokens, int64_t n, int64_t n_out, bool inject) {
    Pass pass;
    LiveGraph & live = run(GraphKind::APPEND, tokens, n, n_out, inject, pass);
    if (draft_ && n == 1) {
        draft_->keep(pass.feature_rows, 1, static_cast<int32_t>(position()));
    }
    tokens_.insert(tokens_.end(), tokens, tokens + n);
    last_ = n_out > 0 ? &live : nullptr;
    first_out_ = n_out > 0 ? n_out - 1 : 0;
}

void Session::check_no_open_verify() const {
    DFL_CHECK(open_tokens_.empty(), DFL_STATUS_ARGUMENT,
              "a verify of %zu rows waits for its commit", open_tokens_.size());
}

void Session::prefill(const int32_t * tokens, int64_t n, float * all_logits,
                      const PrefillProgress & progress) {
    check_no_open_verify();
    check_tokens(tokens, n);
    const int64_t n_vocab = model_->hparams().n_vocab;
    int64_t step = params_.n_ubatch;
    if (all_logits != nullptr) {
        // A row for every token of a large vocabulary would dwarf the rest of the arena.
        step = std::min(step, std::max<int64_t>(1, (int64_t(256) << 20) / (4 * n_vocab)));
    }
    for (int64_t done = 0; done < n;) {
        const int64_t rows = std::min(step, n - done);
        const bool last = done + rows == n;
        const int64_t n_out = all_logits != nullptr ? rows : last ? 1 : 0;
        // Only what the drafter will still see after this prompt is worth injecting.
        const bool inject = draft_ && n - done - rows < draft_->window();
        append(tokens + done, rows, n_out, inject);
        if (all_logits != nullptr) {
            ggml_backend_tensor_get(last_->logits, all_logits + done * n_vocab, 0,
                                    ggml_nbytes(last_->logits));
        }
        done += rows;
        DFL_CHECK(!progress || !progress(done, n) || last, DFL_STATUS_CANCELLED,
                  "cancelled after %lld of %lld tokens", (long long)done, (long long)n);
    }
}

// Index of the first largest value. Sixteen running maxima let the compiler use vector registers.
static int64_t first_largest(const float * x, int64_t n) {
    constexpr int64_t lanes = 16;
    float best[lanes];
    std::fill(best, best + lanes, -INFINITY);
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) {
        for (int64_t j = 0; j < lanes; ++j) {
            best[j] = x[i + j] > best[j] ? x[i + j] : best[j];
        }
    }
    float top = *std::max_element(best, best + lanes);
    for (; i < n; ++i) {
        top = x[i] > top ? x[i] : top;
    }
    return std::find(x, x + n, top) - x;
}

// Appends the k largest of n values, best first, lower index first on ties.
static void best_of(const float * x, int64_t n, int64_t k, std::vector<Candidate> & out) {
    if (k == 1) {
        const int64_t top = first_largest(x, n);
        out.push_back({static_cast<int32_t>(std::min(top, n - 1)), x[std::min(top, n - 1)]});
        return;
    }
    std::vector<Candidate> heap; // the worst kept candidate is in front
    heap.reserve(k + 1);
    const auto better = [](const Candidate & a, const Candidate & b) {
        return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
    };
    for (int64_t i = 0; i < n; ++i) {
        if ((int64_t)heap.size() < k || x[i] > heap.front().logit) {
            heap.push_back({static_cast<int32_t>(i), x[i]});
            std::push_heap(heap.begin(), heap.end(), better);
            if ((int64_t)heap.size() > k) {
                std::pop_heap(heap.begin(), heap.end(), better);
                heap.pop_back();
            }
        }
    }
    std::sort(heap.begin(), heap.end(), better);
    out.insert(out.end(), heap.begin(), heap.end());
}

int32_t Session::argmax(int64_t row) const {
    DFL_CHECK(row >= 0 && row < n_out_rows(), DFL_STATUS_ARGUMENT,
              "row %lld: the last pass has %lld rows", (long long)row, (long long)n_out_rows());
    int32_t id = 0;
    const int64_t n_vocab = model_->hparams().n_vocab;
    if (last_->argmax != nullptr) {
        ggml_backend_tensor_get(last_->argmax, &id, (first_out_ + row) * sizeof id, sizeof id);
    } else {
        const float * rows = static_cast<const float *>(last_->logits->data);
        id = static_cast<int32_t>(first_largest(rows + (first_out_ + row) * n_vocab, n_vocab));
    }
    DFL_CHECK(id >= 0 && id < n_vocab, DFL_STATUS_COMPUTE,
              "the logits of row %lld are not finite numbers", (long long)row);
    return id;
}

void Session::logits(int64_t row, float * dst) const {
    DFL_CHECK(row >= 0 && row < n_out_rows(), DFL_STATUS_ARGUMENT,
              "row %lld: the last pass has %lld rows", (long long)row, (long long)n_out_rows());
    const size_t size = model_->hparams().n_vocab * sizeof(float);
    ggml_backend_tensor_get(last_->logits, dst, (first_out_ + row) * size, size);
}

std::vector<Candidate> Session::draft(int32_t last_token, int64_t n_draft, int64_t k) {
    check_no_open_verify();
    DFL_CHECK(draft_ != nullptr, DFL_STATUS_ARGUMENT, "the session has no drafter");
    check_tokens(&last_token, 1);
    const int64_t most = std::min(draft_->drafter().draft().block_size, DraftState::MAX_VERIFY) - 1;
    DFL_CHECK(n_draft >= 1 && n_draft <= most, DFL_STATUS_ARGUMENT,
              "%lld drafted tokens: the drafter gives 1 to %lld", (long long)n_draft,
              (long long)most);
    last_ = nullptr;
    LiveGraph & live =
        draft_->run_block(graphs_, last_token, static_cast<int32_t>(position()), n_draft);
    const int64_t n_rows = live.logits->ne[0];
    DFL_CHECK(k >= 1 && k <= n_rows, DFL_STATUS_ARGUMENT, "%lld candidates of %lld tokens",
              (long long)k, (long long)n_rows);
    std::vector<float> fetched;
    const float * logits = static_cast<const float *>(live.logits->data);
    if (!backend_.is_host()) {
        fetched.resize(n_rows * n_draft);
        ggml_backend_tensor_get(live.logits, fetched.data(), 0, ggml_nbytes(live.logits));
        logits = fetched.data();
    }
    std::vector<Candidate> all;
    for (int64_t i = 0; i < n_draft; ++i) {
        best_of(logits + i * n_rows, n_rows, k, all);
    }
    for (Candidate & candidate : all) {
        candidate.token = draft_->drafter().token(candidate.token);
    }
    return all;
}

void Session::verify(const int32_t * tokens, int64_t n) {
    check_no_open_verify();
    check_tokens(tokens, n);
    DFL_CHECK(draft_ != nullptr, DFL_STATUS_ARGUMENT, "the session has no drafter");
    DFL_CHECK(n <= DraftState::MAX_VERIFY, DFL_STATUS_ARGUMENT, "%lld rows to verify, at most %lld",
              (long long)n, (long long)DraftState::MAX_VERIFY);
    LiveGraph & live = run(GraphKind::VERIFY, tokens, n, n, false, open_);
    open_tokens_.assign(tokens, tokens + n);
    last_ = &live;
    first_out_ = 0;
}

void Session::commit(int64_t n) {
    DFL_CHECK(n >= 0 && n <= (int64_t)open_tokens_.size(), DFL_STATUS_ARGUMENT,
              "%lld rows to commit, the last verify has %zu", (long long)n, open_tokens_.size());
    if (open_tokens_.empty()) {
        return; // after an interruption callers cannot know whether their verify still waits
    }
    last_ = nullptr; // the promotion below reuses the arena its logits lie in
    if (n > 0 && model_->hparams().n_recurrent() > 0) {
        promote_state(n);
    }
    release(open_, n);
    draft_->keep(open_.feature_rows, n, static_cast<int32_t>(position()));
    tokens_.insert(tokens_.end(), open_tokens_.begin(), open_tokens_.begin() + n);
    open_tokens_.clear();
}

void Session::promote_state(int64_t n_accepted) {
    const int64_t layers = model_->hparams().n_recurrent();
    const int64_t before = model_->hparams().recurrent.d_conv - 1;
    BatchShape shape;
    shape.kind = GraphKind::PROMOTE;
    for (shape.n_rows = 1; shape.n_rows < n_accepted;) {
        shape.n_rows *= 2; // few sizes, so that their graphs live on
    }
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

void Session::forget_from(int64_t position) {
    kv_.cells().release_from(SEQUENCE, static_cast<int32_t>(position));
    if (draft_) {
        draft_->truncate(static_cast<int32_t>(position));
    }
    tokens_.resize(position);
    open_tokens_.clear();
    last_ = nullptr;
}

void Session::reset() {
    kv_.cells().release_from(SEQUENCE, 0);
    recurrent_.clear(SEQUENCE);
    tokens_.clear();
    open_tokens_.clear();
    last_ = nullptr;
    if (draft_) {
        draft_->truncate(0);
    }
}

Checkpoint Session::take() const {
    return {tokens_, recurrent_.save(SEQUENCE)};
}

bool Session::holds(const Checkpoint & checkpoint) const {
    return checkpoint.tokens.size() <= tokens_.size() &&
           std::equal(checkpoint.tokens.begin(), checkpoint.tokens.end(), tokens_.begin());
}

void Session::restore(const Checkpoint & checkpoint) {
    DFL_CHECK(holds(checkpoint), DFL_STATUS_ARGUMENT,
              "the checkpoint of %zu tokens is not a beginning of this session's %lld tokens",
              checkpoint.tokens.size(), (long long)position());
    recurrent_.load(SEQUENCE, checkpoint.recurrent);
    forget_from(checkpoint.tokens.size());
}

void Session::truncate(int64_t position) {
    DFL_CHECK(position >= 0 && position <= this->position(), DFL_STATUS_ARGUMENT,
              "position %lld: the session holds %lld tokens", (long long)position,
              (long long)this->position());
    if (position == this->position()) {
        return;
    }
    if (position == 0) {
        reset();
        return;
    }
    DFL_CHECK(model_->hparams().n_recurrent() == 0, DFL_STATUS_UNSUPPORTED,
              "a model with recurrent layers goes back only to a checkpoint, not to position %lld",
              (long long)position);
    forget_from(position);
}

} // namespace dfl
