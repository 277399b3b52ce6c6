#include "engine/sequence.h"

#include "error.h"

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>

namespace dfl {

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

Sequence::Sequence(std::shared_ptr<Engine> engine)
    : engine_(std::move(engine)), kv_(engine_->kv()), recurrent_(engine_->recurrent()),
      draft_(engine_->draft()), caches_(next_name()) {
    engine_->enter(this);
    tokens_.reserve(engine_->n_ctx());
}

Sequence::~Sequence() {
    try {
        if (position() > 0 || open_.n > 0) {
            reset(); // what the next one finds is as if this one had not been
        }
    } catch (...) { // of a device that fails: the next pass will say so
    }
    engine_->leave(this);
}

void Sequence::check_tokens(const int32_t * tokens, int64_t n, int64_t after) const {
    DFL_CHECK(n >= 1, DFL_STATUS_ARGUMENT, "there are no tokens to run");
    DFL_CHECK(n <= engine_->n_ctx() - after, DFL_STATUS_ARGUMENT,
              "%lld tokens after %lld do not fit into a context of %lld", (long long)n,
              (long long)after, (long long)engine_->n_ctx());
    for (int64_t i = 0; i < n; ++i) {
        DFL_CHECK(tokens[i] >= 0 && tokens[i] < engine_->model().hparams().n_vocab,
                  DFL_STATUS_ARGUMENT, "token id %d is outside the vocabulary of %lld", tokens[i],
                  (long long)engine_->model().hparams().n_vocab);
    }
}

void Sequence::append(const int32_t * tokens, int64_t n, int64_t n_out, bool inject) {
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

void Sequence::prefill(const int32_t * tokens, int64_t n, float * all_logits,
                       const PrefillProgress & progress) {
    check_no_open_verify();
    check_tokens(tokens, n, position());
    const int64_t n_vocab = engine_->model().hparams().n_vocab;
    int64_t step = engine_->n_ubatch();
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
            engine_->main().read(last_->logits, all_logits + done * n_vocab, 0,
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

void Sequence::check_row(int64_t row) const {
    DFL_CHECK(row >= 0 && row < n_out_rows(), DFL_STATUS_ARGUMENT,
              "row %lld: the last pass has %lld rows", (long long)row, (long long)n_out_rows());
}

std::vector<bool> Sequence::finite_rows() const {
    std::vector<bool> finite(n_out_rows());
    if (finite.empty()) {
        return finite;
    }
    const int64_t n_vocab = engine_->model().hparams().n_vocab;
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

void Sequence::note_row(int64_t row, bool is_finite) {
    if (!is_finite) {
        start_anew();
        throw Error(DFL_STATUS_COMPUTE,
                    format("the logits of row %lld are not finite numbers; the sequence forgot all "
                           "it held",
                           (long long)row));
    }
    if (open_.n == 0) {
        n_proven_ = position();
    }
}

int32_t Sequence::argmax(int64_t row) {
    check_row(row);
    int32_t id = 0;
    bool is_finite = true;
    const int64_t n_vocab = engine_->model().hparams().n_vocab;
    if (last_->argmax != nullptr) {
        if (last_->best.empty()) { // all at once: each copy waits for the device
            last_->best.resize(ggml_nelements(last_->argmax));
            engine_->main().read(last_->argmax, last_->best.data(), 0, ggml_nbytes(last_->argmax));
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

const Candidate * Sequence::top(int64_t row, int64_t k) {
    check_row(row);
    DFL_CHECK(last_->shape.n_top > 0, DFL_STATUS_ARGUMENT,
              "row %lld: the device was not told to pick its best", (long long)row);
    DFL_CHECK(last_->shape.n_top == k, DFL_STATUS_ARGUMENT,
              "the %lld best of row %lld: its pass was told to pick %lld", (long long)k,
              (long long)row, (long long)last_->shape.n_top);
    if (last_->candidates.empty()) {
        Draft found = read_draft(*last_, last_->shape.n_top, engine_->main());
        last_->candidates = std::move(found.best);
        last_->sums = std::move(found.sums);
    }
    const int64_t at = first_out_ + row;
    const Candidate * best = last_->candidates.data() + at * last_->shape.n_top;
    // Selections see bounds in place of infinities.
    note_row(row, !std::isnan(last_->sums[at]) && std::fabs(best->logit) < FLT_MAX / 2);
    return best;
}

void Sequence::logits(int64_t row, float * dst) {
    check_row(row);
    const int64_t n_vocab = engine_->model().hparams().n_vocab;
    const size_t size = n_vocab * sizeof(float);
    engine_->main().read(last_->logits, dst, (first_out_ + row) * size, size);
    note_row(row, all_finite(dst, n_vocab));
}

void Sequence::start_anew() {
    n_proven_ = position(); // reset() need not clear what is cleared here
    reset();
    kv_.clear();
    if (draft_) {
        draft_->clear();
    }
    caches_ = next_name();
}

void Sequence::prove() {
    const bool ends_here = open_.n == 0 && last_ != nullptr; // the row that can be read
    if (ends_here && n_proven_ < position() && finite_rows().back()) {
        n_proven_ = position();
    }
}

void Sequence::clear_unproven(int64_t position) {
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

int64_t Sequence::sound(int64_t position) const {
    if (position <= n_proven_ || position == this->position()) {
        return position;
    }
    const auto after = std::upper_bound(passes_.begin(), passes_.end(), position);
    return after == passes_.begin() ? n_proven_ : std::max(n_proven_, after[-1]);
}

void Sequence::forget_from(int64_t position) {
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

void Sequence::reset() {
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

int64_t Sequence::sync(const int32_t * tokens, int64_t n) {
    check_tokens(tokens, n, 0);
    const int64_t most = std::min(n - 1, position());
    int64_t there = std::mismatch(tokens, tokens + most, tokens_.begin()).first - tokens;
    if (engine_->recurs() && there < position()) {
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
    there =
        engine_->recurs() ? there : sound(there); // recurrent states are kept between passes anyway
    if (there > 0) {
        forget_from(there);
    } else {
        reset();
    }
    keep_at_ = engine_->recurs() ? n - 1 : 0;
    return there;
}

void Sequence::keep_state() {
    keep_at_ = 0;
    const bool is_kept = std::any_of(kept_.begin(), kept_.end(), [&](const KeptState & state) {
        return state.position == position();
    });
    if (position() == 0 || is_kept) {
        return;
    }
    if (kept_.size() == Engine::MAX_KEPT) {
        kept_.erase(kept_.begin());
    }
    kept_.push_back({position(), recurrent_.save(SEQUENCE)});
}

void Sequence::drop_states(int64_t position) {
    keep_at_ = 0;
    kept_.erase(std::remove_if(kept_.begin(), kept_.end(),
                               [&](const KeptState & state) { return state.position > position; }),
                kept_.end());
}

Checkpoint Sequence::take() const { return {caches_, tokens_, recurrent_.save(SEQUENCE)}; }

bool Sequence::holds(const Checkpoint & checkpoint) const {
    return checkpoint.caches == caches_ && checkpoint.tokens.size() <= tokens_.size() &&
           std::equal(checkpoint.tokens.begin(), checkpoint.tokens.end(), tokens_.begin());
}

void Sequence::restore(const Checkpoint & checkpoint) {
    DFL_CHECK(
        checkpoint.caches == caches_, DFL_STATUS_ARGUMENT,
        "the checkpoint of %zu tokens was taken of another sequence, or before this one forgot "
        "all it held",
        checkpoint.tokens.size());
    DFL_CHECK(holds(checkpoint), DFL_STATUS_ARGUMENT,
              "the checkpoint of %zu tokens is not a beginning of this sequence's %lld tokens",
              checkpoint.tokens.size(), (long long)position());
    recurrent_.load(SEQUENCE, checkpoint.recurrent);
    forget_from(checkpoint.tokens.size());
}

void Sequence::truncate(int64_t position) {
    DFL_CHECK(position >= 0 && position <= this->position(), DFL_STATUS_ARGUMENT,
              "position %lld: the sequence holds %lld tokens", (long long)position,
              (long long)this->position());
    if (position == 0) {
        reset();
        return;
    }
    DFL_CHECK(position == this->position() || engine_->model().hparams().n_recurrent() == 0,
              DFL_STATUS_UNSUPPORTED,
              "a model with recurrent layers goes back only to a checkpoint, not to position %lld",
              (long long)position);
    prove();
    const int64_t from = sound(position);
    const std::vector<int32_t> again(tokens_.begin() + from, tokens_.begin() + position);
    forget_from(from);
    for (size_t done = 0; done < again.size();) {
        const auto n = std::min<size_t>(engine_->n_ubatch(), again.size() - done);
        append(again.data() + done, static_cast<int64_t>(n), /*n_out =*/0,
               /*inject =*/draft_ != nullptr);
        done += n;
    }
}

} // namespace dfl
