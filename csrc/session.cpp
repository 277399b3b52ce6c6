#include "session.h"

#include "error.h"

#include <algorithm>

namespace dfl {

static constexpr int32_t SEQUENCE = 0; // this timeline's name in the caches

static int64_t pad(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

static SessionParams checked(SessionParams params) {
    DFL_CHECK(params.n_ctx >= 1 && params.n_ctx <= (1 << 24), DFL_STATUS_ARGUMENT,
              "n_ctx is %lld, expected 1 to %d", (long long)params.n_ctx, 1 << 24);
    DFL_CHECK(params.n_ubatch >= 1 && params.n_ubatch <= 65536, DFL_STATUS_ARGUMENT,
              "n_ubatch is %lld, expected 1 to 65536", (long long)params.n_ubatch);
    DFL_CHECK(params.n_threads >= 0 && params.n_threads <= 1024, DFL_STATUS_ARGUMENT,
              "n_threads is %d, expected 0 to 1024", params.n_threads);
    DFL_CHECK(params.draft_window >= 1 && params.draft_window <= (1 << 24), DFL_STATUS_ARGUMENT,
              "draft_window is %lld, expected 1 to %d", (long long)params.draft_window, 1 << 24);
    params.n_ubatch = std::min(params.n_ubatch, params.n_ctx);
    params.draft_window = std::min(params.draft_window, params.n_ctx);
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
        DFL_CHECK(params_.drafter->fits(model_), DFL_STATUS_ARGUMENT,
                  "%s was loaded for another model than %s", params_.drafter->file().path().c_str(),
                  model_->file().path().c_str());
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
        draft_->reserve(graphs_);
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
        ++n_passes_;
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
            backend_.read(last_->logits, all_logits + done * n_vocab, 0,
                          ggml_nbytes(last_->logits));
        }
        done += rows;
        DFL_CHECK(!progress || !progress(done, n) || last, DFL_STATUS_CANCELLED,
                  "cancelled after %lld of %lld tokens", (long long)done, (long long)n);
    }
}

int32_t Session::argmax(int64_t row) const {
    DFL_CHECK(row >= 0 && row < n_out_rows(), DFL_STATUS_ARGUMENT,
              "row %lld: the last pass has %lld rows", (long long)row, (long long)n_out_rows());
    int32_t id = 0;
    const int64_t n_vocab = model_->hparams().n_vocab;
    if (last_->argmax != nullptr) {
        backend_.read(last_->argmax, &id, (first_out_ + row) * sizeof id, sizeof id);
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
    backend_.read(last_->logits, dst, (first_out_ + row) * size, size);
}

void Session::forget_from(int64_t position) {
    kv_.cells().release_from(SEQUENCE, static_cast<int32_t>(position));
    if (draft_) {
        draft_->truncate(static_cast<int32_t>(position));
    }
    tokens_.resize(position);
    close_verify();
    last_ = nullptr;
}

void Session::reset() {
    kv_.cells().release_from(SEQUENCE, 0);
    recurrent_.clear(SEQUENCE);
    tokens_.clear();
    close_verify();
    last_ = nullptr;
    if (draft_) {
        draft_->truncate(0);
    }
}

Checkpoint Session::take() const { return {tokens_, recurrent_.save(SEQUENCE, backend_)}; }

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
    if (position == 0) {
        reset();
        return;
    }
    DFL_CHECK(position == this->position() || model_->hparams().n_recurrent() == 0,
              DFL_STATUS_UNSUPPORTED,
              "a model with recurrent layers goes back only to a checkpoint, not to position %lld",
              (long long)position);
    forget_from(position);
}

} // namespace dfl
