#include "engine/sequence.h"

#include "error.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

namespace dfl {

Sequence::Sequence(std::shared_ptr<Engine> engine)
    : engine_(std::move(engine)), kv_(engine_->kv()), recurrent_(engine_->recurrent()), slot_(-1),
      blocks_(engine_->caches().size()) {
    tokens_.reserve(engine_->n_ctx());
    slot_ =
        engine_->register_sequence(this); // last step: after it an exception would leak the slot
}

Sequence::~Sequence() {
    try {
        if (position() > 0 || pending_verify_.n > 0) {
            reset(); // the next sequence in the slot must find no old state
        }
    } catch (...) { // a destructor cannot report that the device failed; the next pass will
    }
    engine_->unregister_sequence(this);
}

void Sequence::check_no_pending_verify() const {
    DFL_CHECK(pending_verify_.n == 0, DFL_STATUS_ARGUMENT,
              "the sequence has a verify of %lld rows, commit it first",
              (long long)pending_verify_.n);
}

void Engine::check_ids(const int32_t * tokens, int64_t n, int64_t after) const {
    DFL_CHECK(n >= 1, DFL_STATUS_ARGUMENT,
              "the list of tokens is empty, it must hold at least one");
    DFL_CHECK(n <= n_ctx() - after, DFL_STATUS_ARGUMENT,
              "%lld tokens after %lld do not fit into a context of %lld", (long long)n,
              (long long)after, (long long)n_ctx());
    const int64_t n_vocab = model_->hparams().n_vocab;
    for (int64_t i = 0; i < n; ++i) {
        DFL_CHECK(tokens[i] >= 0 && tokens[i] < n_vocab, DFL_STATUS_ARGUMENT,
                  "token id %d is outside the vocabulary of %lld", tokens[i], (long long)n_vocab);
    }
}

void Sequence::appended(const PassEntry & entry, const int32_t * tokens, CachedGraph & cached) {
    tokens_.insert(tokens_.end(), tokens, tokens + entry.n);
    add_features(entry.feature_rows);
    kv_.slide_window(slot_, position());
    const bool is_finite = std::all_of(entry.finite.begin(), entry.finite.end(),
                                       [](bool is_finite) { return is_finite; });
    if (!is_finite) {
        reset_and_zero();
    }
    // A non-finite append without logits makes one row readable, for check_append() to report.
    const size_t n_rows = is_finite && entry.n_out == 0 ? 0 : 1;
    set_rows(cached, entry.first_out + entry.n_out - 1, std::vector<bool>(n_rows, is_finite));
}

void Sequence::add_features(const std::vector<int64_t> & rows) {
    std::vector<Feature> features;
    const int64_t first = position() - static_cast<int64_t>(rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
        features.push_back({slot_, rows[i], static_cast<int32_t>(first + i), tokens_[first + i]});
    }
    for (const auto & draft : engine_->drafts()) {
        draft->add_pending(features);
    }
}

void Sequence::set_rows(CachedGraph & cached, int64_t first_out, std::vector<bool> finite) {
    last_ = &cached;
    first_out_ = first_out;
    first_row_ += static_cast<int64_t>(finite_.size());
    finite_ = std::move(finite);
    n_fetched_ = 0;
}

void Sequence::verified(PassEntry entry, CachedGraph & cached) {
    set_rows(cached, entry.first_out, entry.finite);
    pending_verify_ = std::move(entry);
}

void Sequence::failed(const PassEntry & entry, bool may_have_moved) {
    if (may_have_moved && !entry.is_verify && engine_->is_recurrent()) {
        reset(); // after an error the states of some layers may have advanced
        return;
    }
    for (const auto & draft : engine_->drafts()) {
        draft->truncate(slot_, static_cast<int32_t>(position()));
    }
}

void Sequence::accept(const int32_t * nodes, int64_t n) {
    if (pending_verify_.n == 0) {
        return; // no verify is pending: an interrupted caller may commit a second time
    }
    last_ = nullptr;
    std::vector<int64_t> feature_rows;
    const auto first = static_cast<int32_t>(position());
    for (size_t g = 0; g < pending_verify_.cells.size(); ++g) {
        KvGroup & group = kv_.groups()[g];
        const std::vector<int64_t> & cells = pending_verify_.cells[g];
        // CPU kernels sum over cells in memory order: moving accepted rows to the cells of plain
        // decoding keeps its sums. Cells of a verify ascend and nodes follow their parents, so a
        // row moves to a lower cell whose own row has moved or is dropped.
        const bool moves = group.is_host();
        for (int64_t i = 0; i < n; ++i) {
            const int64_t cell = cells[moves ? i : nodes[i]];
            if (moves) {
                group.copy_cells({cells[nodes[i]], cell, 1});
            }
            group.cells().place(cell, first + pending_verify_.tree.depth(nodes[i]));
        }
    }
    for (int64_t i = 0; i < n; ++i) {
        tokens_.push_back(pending_verify_.tree.token(nodes[i]));
        if (pending_verify_.is_tapped) {
            feature_rows.push_back(pending_verify_.feature_rows[nodes[i]]);
        }
    }
    close_verify();
    add_features(feature_rows);
    kv_.slide_window(slot_, position());
}

void Sequence::check_row(int64_t row) {
    DFL_CHECK(row >= 0 && row < n_out_rows(), DFL_STATUS_ARGUMENT,
              "these logits are gone: the engine has run again, or the sequence has changed");
    check_finite(row, finite_[row]);
}

void Sequence::check_append() {
    if (pending_verify_.n == 0 && n_out_rows() > 0) {
        check_row(0);
    }
}

void Sequence::check_finite(int64_t row, bool is_finite) {
    if (!is_finite) {
        reset_and_zero();
        throw Error(DFL_STATUS_COMPUTE,
                    format("the logits of row %lld are not finite numbers; the sequence is now "
                           "empty",
                           (long long)row));
    }
}

bool Sequence::find_argmax(int64_t row, int32_t & token) {
    const int64_t n_vocab = engine_->model().hparams().n_vocab;
    if (last_->argmax != nullptr) {
        token = last_->values<int32_t>(last_->argmax)[first_out_ + row];
        return token >= 0 && token < n_vocab; // devices return arbitrary ids for rows with NaN
    }
    const float * logits =
        static_cast<const float *>(last_->logits->data) + (first_out_ + row) * n_vocab;
    token = static_cast<int32_t>(first_largest(logits, n_vocab));
    return token < n_vocab && std::isfinite(logits[token]);
}

int32_t Sequence::argmax(int64_t row) {
    check_row(row);
    int32_t token = 0;
    check_finite(row, find_argmax(row, token));
    return token;
}

bool Sequence::find_top(int64_t row, const Candidate *& best) {
    if (last_->candidates.empty()) {
        last_->candidates = read_draft(*last_, last_->shape.n_top, engine_->main()).best;
    }
    const int64_t at = first_out_ + row;
    best = last_->candidates.data() + at * last_->shape.n_top;
    // The device selects among logits clamped to +-FLT_MAX / 2: the bounds stand for infinities.
    return !std::isnan(last_->values<float>(last_->top.sums)[at]) &&
           std::fabs(best->logit) < FLT_MAX / 2;
}

// Bytes that a device copies to the host while one read waits for it: 20 us at 12 GB/s.
static constexpr size_t BYTES_A_WAIT = 256 << 10;

float * Sequence::whole_row(int64_t row) {
    const int64_t n_vocab = engine_->model().hparams().n_vocab;
    if (engine_->main().is_host()) {
        return static_cast<float *>(last_->logits->data) + (first_out_ + row) * n_vocab;
    }
    const size_t size = n_vocab * sizeof(float);
    if (row < first_fetched_ || row >= first_fetched_ + n_fetched_) {
        // A round needs about half of its rows, a path that only sampling finds. Reading all costs
        // less than a wait for each if a row is copied faster than a read waits.
        const bool all = size <= BYTES_A_WAIT;
        first_fetched_ = all ? 0 : row;
        n_fetched_ = all ? n_out_rows() : 1;
        fetched_.resize(n_fetched_ * n_vocab);
        engine_->main().read(last_->logits, fetched_.data(), (first_out_ + first_fetched_) * size,
                             n_fetched_ * size);
    }
    return fetched_.data() + (row - first_fetched_) * n_vocab;
}

bool Sequence::sample(int64_t row, const Sampler & sampler, TokenHistory history, int64_t position,
                      const uint32_t * mask, int32_t & token) {
    if (!finite_[row]) {
        return false;
    }
    if (sampler.is_argmax()) {
        if (!find_argmax(row, token)) {
            return false;
        }
        if (!sampler.is_banned(token) && is_allowed(mask, token)) {
            return true;
        }
    }
    SampledToken sampled = {};
    const int64_t n_best = sampler.n_best(), n_top = last_->shape.n_top;
    if (n_best > 0 && n_best <= n_top) {
        const Candidate * best = nullptr;
        if (!find_top(row, best)) {
            return false;
        }
        if (sampler.sample_from(best, n_top, history, position, mask, sampled)) {
            token = sampled.token;
            return true;
        }
    }
    const int64_t n_vocab = engine_->model().hparams().n_vocab;
    float * logits = whole_row(row);
    if (mask != nullptr) {
        masked_.resize(n_vocab);
        mask_row(logits, mask, n_vocab, masked_.data());
        logits = masked_.data();
    }
    if (sampler.sample(logits, n_vocab, history, position, sampled)) {
        return false;
    }
    token = sampled.token;
    return true;
}

void Sequence::logits(const std::vector<int64_t> & rows, float * dst) {
    const int64_t n_vocab = engine_->model().hparams().n_vocab;
    const size_t size = n_vocab * sizeof(float);
    std::vector<Backend::Fetch> fetches;
    for (const int64_t row : rows) {
        check_row(row);
        fetches.push_back(
            {last_->logits, dst + fetches.size() * n_vocab, (first_out_ + row) * size, size});
    }
    engine_->main().read(fetches);
    for (const int64_t row : rows) {
        check_finite(row, all_finite(dst, n_vocab));
        dst += n_vocab;
    }
}

void Sequence::reset_and_zero() {
    reset();
    kv_.clear(slot_);
    for (const auto & draft : engine_->drafts()) {
        draft->clear(slot_);
    }
}

void Sequence::close_verify() {
    for (size_t g = 0; g < pending_verify_.cells.size(); ++g) {
        KvGroup & group = kv_.groups()[g];
        for (size_t i = pending_verify_.cells[g].size(); i-- > 0;) {
            const int64_t cell = pending_verify_.cells[g][i];
            if (group.cells().position(cell) != CellTable::FREE) {
                continue;
            }
            if (!pending_verify_.finite[static_cast<int64_t>(i) < pending_verify_.n
                                            ? i
                                            : 0]) { // padding cells hold copies of the root's row
                group.clear_cell(cell);
            }
            group.cells().release(cell);
        }
    }
    pending_verify_ = {};
}

void Sequence::forget_from(int64_t position) {
    close_verify();
    for (KvGroup & group : kv_.groups()) {
        group.release_from(slot_, static_cast<int32_t>(position));
    }
    for (const auto & draft : engine_->drafts()) {
        draft->truncate(slot_, static_cast<int32_t>(position));
    }
    forget_blocks(position);
    tokens_.resize(position);
    last_ = nullptr;
}

void Sequence::reset() {
    forget_from(0);
    recurrent_.clear(slot_);
}

} // namespace dfl
