#include "engine/session.h"

#include "error.h"
#include "graph/path_inputs.h"
#include "layers/delta_net.h"
#include "layers/delta_rule.h"
#include "layers/host/walked_delta_net.h"

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>

namespace dfl {

static int64_t pad(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

static SessionParams checked(SessionParams params) {
    DFL_CHECK(params.n_ctx >= 1 && params.n_ctx <= (1 << 24), DFL_STATUS_ARGUMENT,
              "n_ctx is %lld, expected 1 to %d", (long long)params.n_ctx, 1 << 24);
    DFL_CHECK(params.n_ubatch >= 1 && params.n_ubatch <= 65536, DFL_STATUS_ARGUMENT,
              "n_ubatch is %lld, expected 1 to 65536", (long long)params.n_ubatch);
    DFL_CHECK(params.n_threads >= 0 && params.n_threads <= DFL_MAX_THREADS, DFL_STATUS_ARGUMENT,
              "n_threads is %d, expected 0 to %d", params.n_threads, DFL_MAX_THREADS);
    DFL_CHECK(params.draft_window >= 1 && params.draft_window <= (1 << 24), DFL_STATUS_ARGUMENT,
              "draft_window is %lld, expected 1 to %d", (long long)params.draft_window, 1 << 24);
    params.n_ubatch = std::min(params.n_ubatch, params.n_ctx);
    params.draft_window = std::min(params.draft_window, params.n_ctx);
    return params;
}

// n_by_paths: rows of a prefill whose recurrent layers take the form for trees.
static size_t max_nodes(const Model & model, const Drafter * drafter, int64_t n_by_paths) {
    const Hparams & hp = model.hparams();
    size_t n = 512 + hp.n_layer() * (96 + 4 * hp.experts.n_used);
    n += hp.n_recurrent() * std::max(path_nodes(Session::MAX_VERIFY, Session::MAX_VERIFY),
                                     path_nodes(n_by_paths, PATH_CHUNK));
    if (drafter != nullptr) {
        n += drafter->hparams().n_layer() * 128;
    }
    return n;
}

static uint64_t next_name() {
    static std::atomic<uint64_t> n_given = 0;
    return ++n_given;
}

// Also of a row that bans tokens by -inf.
static bool all_finite(const float * logits, int64_t n) {
    int n_others = 0; // counted, as a loop that may end early uses no vector registers
    for (int64_t i = 0; i < n; ++i) {
        n_others += !(logits[i] < INFINITY);
    }
    return n_others == 0;
}

LayerPlace Session::layer_place() {
    return [this](int64_t il) -> Backend & { return devices_.of_layer(il); };
}

// K/V of the drafter as exact as the target's, where that is exact; else half precision.
static ggml_type draft_cache_type(const SessionParams & params) {
    return params.type_k == GGML_TYPE_F32 ? GGML_TYPE_F32 : GGML_TYPE_F16;
}

Session::Session(std::shared_ptr<const Model> model, const SessionParams & params)
    : model_(std::move(model)), params_(checked(params)),
      devices_(model_->device(), model_->split(), params_.n_threads, {}, model_->measure()),
      recurs_(model_->hparams().n_recurrent() > 0),
      kv_(model_->hparams(), layer_place(), params_.type_k, params_.type_v, pad(params_.n_ctx, 256),
          params_.n_ubatch),
      recurrent_(model_->hparams(), layer_place(), 1),
      walks_(recurs_ && params_.delta_form == DeltaForm::OWN && devices_.main().runs_cpu_nodes() &&
             walks_delta_net(model_->hparams().recurrent)),
      fused_(walks_ || (recurs_ && params_.delta_form != DeltaForm::STOCK &&
                        has_fused_delta_rule(recurrent_, model_->hparams().recurrent))),
      sizes_(devices_),
      graphs_(devices_, max_nodes(*model_, params_.drafter.get(), fused_ ? 0 : params_.n_ubatch)),
      caches_(next_name()) {
    tokens_.reserve(params_.n_ctx);
    if (params_.drafter) {
        DFL_CHECK(params_.drafter->fits(model_), DFL_STATUS_ARGUMENT,
                  "%s was loaded for another model than %s", params_.drafter->file().path().c_str(),
                  model_->file().path().c_str());
        verify_rows_ = std::min(params_.drafter->draft().block_size, MAX_VERIFY);
        recurrent_.reserve_trace(sizes_.verify_rows(verify_rows_, model_->weights()));
        kv_.masks().reserve(sizes_.verify_rows(verify_rows_, model_->weights()));
        draft_ = std::make_unique<DraftState>(
            params_.drafter, *model_, devices_, draft_cache_type(params_), params_.draft_window,
            params_.n_ubatch, verify_rows_, /*max_block =*/verify_rows_);
    }
    reserve_graphs();
}

// The largest graphs reserve the arena, so that memory runs out here or not at all.
void Session::reserve_graphs() {
    BatchShape largest;
    largest.n_rows = params_.n_ubatch;
    largest.n_kv = kv_.cells().size();
    largest.n_out = 1;
    largest.n_inject = draft_ && params_.n_ubatch > 1 ? params_.n_ubatch : 0;
    largest.walks = walks_;
    largest.by_paths = recurs_ && !fused_;
    pick_top(largest, selects_top(MAX_TOP) ? MAX_TOP : 0);
    graphs_.get(largest, [&](LiveGraph & live) { build_forward(live, largest.n_inject > 0); });
    if (draft_) {
        reserve_verify_graphs(verify_rows_);
        draft_->reserve(graphs_);
    }
}

void Session::check_tokens(const int32_t * tokens, int64_t n, int64_t after) const {
    DFL_CHECK(n >= 1, DFL_STATUS_ARGUMENT, "there are no tokens to run");
    DFL_CHECK(n <= n_ctx() - after, DFL_STATUS_ARGUMENT,
              "%lld tokens after %lld do not fit into a context of %lld", (long long)n,
              (long long)after, (long long)n_ctx());
    for (int64_t i = 0; i < n; ++i) {
        DFL_CHECK(tokens[i] >= 0 && tokens[i] < model_->hparams().n_vocab, DFL_STATUS_ARGUMENT,
                  "token id %d is outside the vocabulary of %lld", tokens[i],
                  (long long)model_->hparams().n_vocab);
    }
}

void Session::pick_top(BatchShape & shape, int64_t k) const {
    shape.n_top = std::min(k, model_->hparams().n_vocab);
    shape.top_by_blocks = shape.n_top > 0 && selects_by_blocks(devices_.main());
}

void Session::build_forward(LiveGraph & live, bool taps) {
    live.in = make_inputs(live.ctx.get(), model_->hparams(), kv_.masks(), live.shape);
    if (live.shape.by_paths) {
        make_path_inputs(live, model_->hparams().recurrent);
    }
    Build b = {live.ctx.get(),    live.graph,        live.cpu_nodes,
               model_->hparams(), model_->weights(), kv_,
               recurrent_,        live.shape,        live.in};
    if (taps) {
        draft_->add_taps(live, b);
    }
    finish_logits(live, model_->arch().build(b), devices_.main());
    if (live.shape.n_inject > 0) {
        draft_->add_prefill_injection(live);
    }
}

void Session::append(const int32_t * tokens, int64_t n, int64_t n_out, bool inject) {
    Pass pass = plan_append(tokens, n);
    LiveGraph & live = run(pass, n_out, inject);
    if (draft_ && n == 1) {
        draft_->keep(pass.feature_rows, static_cast<int32_t>(position()));
    }
    while (!passes_.empty() && (n_proven_ == position() || passes_.back() >= position())) {
        passes_.pop_back();
    }
    passes_.push_back(position());
    tokens_.insert(tokens_.end(), tokens, tokens + n);
    last_ = n_out > 0 ? &live : nullptr;
    first_out_ = n_out > 0 ? n_out - 1 : 0;
    n_out_rows_ = 1;
}

void Session::prefill(const int32_t * tokens, int64_t n, float * all_logits,
                      const PrefillProgress & progress) {
    check_no_open_verify();
    check_tokens(tokens, n, position());
    const int64_t n_vocab = model_->hparams().n_vocab;
    int64_t step = params_.n_ubatch;
    if (all_logits != nullptr) {
        // A row for every token of a large vocabulary would dwarf the rest of the arena.
        step = std::min(step, std::max<int64_t>(1, (int64_t(256) << 20) / (4 * n_vocab)));
    }
    for (int64_t done = 0; done < n;) {
        int64_t rows = std::min(step, n - done);
        if (all_logits == nullptr && position() < keep_at_) {
            rows = std::min(rows, keep_at_ - position());
        } else if (all_logits == nullptr && position() == keep_at_) {
            keep_state();
        }
        const bool last = done + rows == n;
        const int64_t n_out = all_logits != nullptr ? rows : last ? 1 : 0;
        // Only what the drafter will still see after this prompt is worth injecting.
        const bool inject = draft_ && n - done - rows < draft_->window();
        append(tokens + done, rows, n_out, inject);
        if (all_logits != nullptr) {
            devices_.main().read(last_->logits, all_logits + done * n_vocab, 0,
                                 ggml_nbytes(last_->logits));
            for (int64_t row = 0; row < rows; ++row) {
                note_row(done + row, all_finite(all_logits + (done + row) * n_vocab, n_vocab));
            }
        }
        done += rows;
        DFL_CHECK(!progress || !progress(done, n) || last, DFL_STATUS_CANCELLED,
                  "cancelled after %lld of %lld tokens", (long long)done, (long long)n);
    }
}

void Session::check_row(int64_t row) const {
    DFL_CHECK(row >= 0 && row < n_out_rows(), DFL_STATUS_ARGUMENT,
              "row %lld: the last pass has %lld rows", (long long)row, (long long)n_out_rows());
}

std::vector<bool> Session::finite_rows() const {
    std::vector<bool> finite(n_out_rows());
    if (finite.empty()) {
        return finite;
    }
    const int64_t n_vocab = model_->hparams().n_vocab;
    const bool is_host = last_->argmax == nullptr;
    if (!is_host && last_->firsts.empty()) {
        last_->firsts.resize(last_->logits->ne[1]);
        ggml_backend_tensor_get_2d(last_->logits, last_->firsts.data(), 0, sizeof(float),
                                   last_->firsts.size(), last_->logits->nb[1], sizeof(float));
    }
    for (size_t row = 0; row < finite.size(); ++row) {
        const int64_t at = first_out_ + static_cast<int64_t>(row);
        const float first = is_host ? static_cast<const float *>(last_->logits->data)[at * n_vocab]
                                    : last_->firsts[at];
        finite[row] = first < INFINITY;
    }
    return finite;
}

void Session::note_row(int64_t row, bool is_finite) {
    if (!is_finite) {
        start_anew();
        throw Error(DFL_STATUS_COMPUTE,
                    format("the logits of row %lld are not finite numbers; the session forgot all "
                           "it held",
                           (long long)row));
    }
    if (open_.n == 0) {
        n_proven_ = position();
    }
}

int32_t Session::argmax(int64_t row) {
    check_row(row);
    int32_t id = 0;
    bool is_finite = true;
    const int64_t n_vocab = model_->hparams().n_vocab;
    if (last_->argmax != nullptr) {
        if (last_->best.empty()) { // all at once: each copy waits for the device
            last_->best.resize(ggml_nelements(last_->argmax));
            devices_.main().read(last_->argmax, last_->best.data(), 0, ggml_nbytes(last_->argmax));
        }
        id = last_->best[first_out_ + row];
        is_finite = finite_rows()[row]; // argmax may name any among NaNs
    } else {
        const float * logits =
            static_cast<const float *>(last_->logits->data) + (first_out_ + row) * n_vocab;
        id = static_cast<int32_t>(first_largest(logits, n_vocab));
        is_finite = id < n_vocab && std::isfinite(logits[id]);
    }
    note_row(row, is_finite && id >= 0 && id < n_vocab);
    return id;
}

bool Session::keep_top(int64_t k) {
    DFL_CHECK(k >= 0 && k <= MAX_TOP && k <= model_->hparams().n_vocab, DFL_STATUS_ARGUMENT,
              "the %lld best of a row, expected 0 to %lld", (long long)k, (long long)MAX_TOP);
    n_top_ = k > 0 && selects_top(k) ? k : 0;
    return n_top_ == k;
}

const Candidate * Session::top(int64_t row) {
    check_row(row);
    DFL_CHECK(last_->shape.n_top > 0, DFL_STATUS_ARGUMENT,
              "row %lld: the device was not told to pick its best", (long long)row);
    if (last_->candidates.empty()) {
        Draft found = read_draft(*last_, last_->shape.n_top, devices_.main());
        last_->candidates = std::move(found.best);
        last_->sums = std::move(found.sums);
    }
    const int64_t at = first_out_ + row;
    const Candidate * best = last_->candidates.data() + at * last_->shape.n_top;
    // Selections see bounds in place of infinities.
    note_row(row, !std::isnan(last_->sums[at]) && std::fabs(best->logit) < FLT_MAX / 2);
    return best;
}

bool Session::selects_top(int64_t k) const {
    const Backend & backend = devices_.main();
    ggml_context_ptr ctx(ggml_init({2 * ggml_tensor_overhead(), nullptr, true}));
    ggml_tensor * row = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, model_->hparams().n_vocab);
    return selects_on_device(backend, row->ne[0], k) && backend.runs(ggml_sum_rows(ctx.get(), row));
}

void Session::logits(int64_t row, float * dst) {
    check_row(row);
    const int64_t n_vocab = model_->hparams().n_vocab;
    const size_t size = n_vocab * sizeof(float);
    devices_.main().read(last_->logits, dst, (first_out_ + row) * size, size);
    note_row(row, all_finite(dst, n_vocab));
}

void Session::start_anew() {
    n_proven_ = position(); // reset() need not clear what is cleared here
    reset();
    kv_.clear();
    if (draft_) {
        draft_->clear();
    }
    caches_ = next_name();
}

void Session::prove() {
    const bool ends_here = open_.n == 0 && last_ != nullptr; // the row that can be read
    if (ends_here && n_proven_ < position() && finite_rows().back()) {
        n_proven_ = position();
    }
}

void Session::clear_unproven(int64_t position) {
    prove();
    const int64_t first = std::max(position, n_proven_);
    if (first < this->position()) {
        kv_.clear_from(SEQUENCE, static_cast<int32_t>(first));
        if (draft_) {
            draft_->clear_from(static_cast<int32_t>(first));
        }
    }
    n_proven_ = std::min(n_proven_, position);
}

int64_t Session::sound(int64_t position) const {
    if (position <= n_proven_ || position == this->position()) {
        return position;
    }
    const auto after = std::upper_bound(passes_.begin(), passes_.end(), position);
    return after == passes_.begin() ? n_proven_ : std::max(n_proven_, after[-1]);
}

void Session::forget_from(int64_t position) {
    clear_unproven(position);
    close_verify();
    kv_.cells().release_from(SEQUENCE, static_cast<int32_t>(position));
    if (draft_) {
        draft_->truncate(static_cast<int32_t>(position));
    }
    drop_states(position);
    tokens_.resize(position);
    last_ = nullptr;
}

void Session::reset() {
    clear_unproven(0);
    close_verify();
    kv_.cells().release_from(SEQUENCE, 0);
    recurrent_.clear(SEQUENCE);
    drop_states(0);
    tokens_.clear();
    last_ = nullptr;
    if (draft_) {
        draft_->truncate(0);
    }
}

int64_t Session::sync(const int32_t * tokens, int64_t n) {
    check_tokens(tokens, n, 0);
    const int64_t most = std::min(n - 1, position());
    int64_t there = std::mismatch(tokens, tokens + most, tokens_.begin()).first - tokens;
    if (recurs_ && there < position()) {
        const KeptState * best = nullptr;
        for (const KeptState & state : kept_) {
            if (state.position <= there && (best == nullptr || state.position > best->position)) {
                best = &state;
            }
        }
        there = best != nullptr ? best->position : 0;
        if (best != nullptr) {
            recurrent_.load(SEQUENCE, best->recurrent);
        }
    }
    prove();
    there = recurs_ ? there : sound(there); // recurrent states are kept between passes anyway
    if (there > 0) {
        forget_from(there);
    } else {
        reset();
    }
    keep_at_ = recurs_ ? n - 1 : 0;
    return there;
}

void Session::keep_state() {
    keep_at_ = 0;
    const bool is_kept = std::any_of(kept_.begin(), kept_.end(), [&](const KeptState & state) {
        return state.position == position();
    });
    if (position() == 0 || is_kept) {
        return;
    }
    if (kept_.size() == MAX_KEPT) {
        kept_.erase(kept_.begin());
    }
    kept_.push_back({position(), recurrent_.save(SEQUENCE)});
}

void Session::drop_states(int64_t position) {
    keep_at_ = 0;
    kept_.erase(std::remove_if(kept_.begin(), kept_.end(),
                               [&](const KeptState & state) { return state.position > position; }),
                kept_.end());
}

Checkpoint Session::take() const { return {caches_, tokens_, recurrent_.save(SEQUENCE)}; }

bool Session::holds(const Checkpoint & checkpoint) const {
    return checkpoint.caches == caches_ && checkpoint.tokens.size() <= tokens_.size() &&
           std::equal(checkpoint.tokens.begin(), checkpoint.tokens.end(), tokens_.begin());
}

void Session::restore(const Checkpoint & checkpoint) {
    DFL_CHECK(
        checkpoint.caches == caches_, DFL_STATUS_ARGUMENT,
        "the checkpoint of %zu tokens was taken of another session, or before this one forgot "
        "all it held",
        checkpoint.tokens.size());
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
    prove();
    const int64_t from = sound(position);
    const std::vector<int32_t> again(tokens_.begin() + from, tokens_.begin() + position);
    forget_from(from);
    for (size_t done = 0; done < again.size();) {
        const auto n = std::min<size_t>(params_.n_ubatch, again.size() - done);
        append(again.data() + done, static_cast<int64_t>(n), /*n_out =*/0,
               /*inject =*/draft_ != nullptr);
        done += n;
    }
}

} // namespace dfl
