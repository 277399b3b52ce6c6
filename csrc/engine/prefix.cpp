#include "engine/prefix.h"

#include "engine/sequence.h"
#include "error.h"

#include <algorithm>
#include <unordered_set>

namespace dfl {

static constexpr int64_t PAGE = CellTable::PAGE;

PrefixState::PrefixState(RawBytes bytes, uint64_t & host_bytes)
    : bytes_(std::move(bytes)), host_bytes_(host_bytes) {
    host_bytes_ += bytes_.size();
}

Prefix::Prefix(std::shared_ptr<Engine> engine, std::vector<int32_t> tokens, int64_t n_proven,
               std::vector<CacheRows> rows, std::shared_ptr<PrefixState> state)
    : engine_(std::move(engine)), tokens_(std::move(tokens)), n_proven_(n_proven),
      rows_(std::move(rows)), state_(std::move(state)) {
    find_parts();
}

Prefix::Prefix(std::shared_ptr<Engine> engine, std::vector<int32_t> tokens,
               const std::vector<int64_t> & n_rows)
    : engine_(std::move(engine)), tokens_(std::move(tokens)), n_proven_(size()) {
    const std::vector<KvGroup *> caches = engine_->caches();
    DFL_CHECK(n_rows.size() == caches.size(), DFL_STATUS_ARGUMENT,
              "a prefix of %zu caches, the engine has %zu", n_rows.size(), caches.size());
    for (size_t i = 0; i < caches.size(); ++i) {
        const int64_t most = std::min(size(), engine_->most_kept(i, size()) + PAGE - 1);
        DFL_CHECK(n_rows[i] <= most && n_rows[i] >= engine_->least_kept(i, size()),
                  DFL_STATUS_ARGUMENT,
                  "%lld rows in cache %zu of a prefix of %lld tokens, expected %lld",
                  (long long)n_rows[i], i, (long long)size(), (long long)most);
        rows_.emplace_back();
        for (int64_t at = size() - n_rows[i]; at < size();) {
            const int64_t n = std::min(size(), (at / PAGE + 1) * PAGE) - at;
            rows_.back().push_back(std::make_shared<KeptRows>(*caches[i], engine_->kept_bytes(),
                                                              static_cast<int32_t>(at), n));
            at += n;
        }
    }
    if (engine_->recurs()) {
        RawBytes zeros(engine_->recurrent().sequence_bytes(), 0);
        state_ = std::make_shared<PrefixState>(std::move(zeros), engine_->kept_bytes());
    }
    find_parts();
}

void Prefix::find_parts() {
    const std::vector<KvGroup *> caches = engine_->caches();
    for (size_t i = 0; i < caches.size(); ++i) {
        const std::vector<ggml_tensor *> tensors = caches[i]->tensors();
        for (size_t j = 0; j < tensors.size(); ++j) {
            const int64_t n = n_rows(i);
            const char * owner = engine_->is_drafters(i) ? "draft." : "";
            parts_.push_back({owner + std::string(tensors[j]->name),
                              tensors[j]->type,
                              {tensors[j]->ne[0], n},
                              n * tensors[j]->nb[1],
                              i,
                              j});
        }
    }
    if (state_ != nullptr) {
        const int64_t layers = engine_->model().hparams().n_recurrent();
        const RecurrentShape & shape = engine_->model().hparams().recurrent;
        for (const auto & [name, n] :
             {std::pair("state", shape.state_size()),
              std::pair("conv", shape.conv_channels() * (shape.d_conv - 1))}) {
            parts_.push_back({name,
                              GGML_TYPE_F32,
                              {n, layers},
                              static_cast<uint64_t>(n * layers) * sizeof(float),
                              caches.size(),
                              parts_.size()});
        }
    }
}

int64_t Prefix::n_rows(size_t cache) const {
    int64_t n = 0;
    for (const auto & rows : rows_[cache]) {
        n += rows->n();
    }
    return n;
}

int64_t Prefix::n_draft() const {
    return engine_->draft() != nullptr ? n_rows(rows_.size() - 1) : 0;
}

uint64_t Prefix::own_bytes() const {
    uint64_t sum = state_ != nullptr && state_.use_count() == 1 ? state_->bytes().size() : 0;
    for (const CacheRows & cache : rows_) {
        for (const auto & rows : cache) {
            sum += rows.use_count() == 1 ? rows->host_bytes() : 0;
        }
    }
    return sum;
}

int64_t Prefix::n_own_cells() const {
    return std::count_if(
               rows_[0].begin(), rows_[0].end(),
               [](const auto & rows) { return rows.use_count() == 1 && rows->is_idle(); }) *
           PAGE;
}

int64_t Prefix::wanted_cells(int64_t n) const {
    if (!engine_->shares(0)) {
        return (n + PAGE - 1) / PAGE * PAGE;
    }
    int64_t wanted = n % PAGE > 0 ? PAGE : 0;
    for (int64_t i = 0; i < n / PAGE; ++i) {
        wanted += rows_[0][i]->page() < 0 ? PAGE : 0;
    }
    return wanted;
}

void Prefix::was_used(int64_t n, uint64_t when) const {
    for (const auto & rows : rows_[0]) {
        if (rows->position() < n) {
            rows->was_used(when);
        }
    }
}

void Prefix::read(size_t part, uint8_t * to) const {
    const Part & of = parts_[part];
    if (of.cache == rows_.size()) {
        const RawBytes & bytes = state_->bytes();
        const bool is_state = of.name == "state";
        std::copy_n(bytes.data() + (is_state ? 0 : bytes.size() - of.bytes), of.bytes, to);
        return;
    }
    for (const auto & rows : rows_[of.cache]) {
        rows->read(of.tensor, to);
        to += rows->n() * ggml_row_size(of.type, of.ne[0]);
    }
}

void Prefix::write(size_t part, const uint8_t * from) {
    const Part & of = parts_[part];
    if (of.cache == rows_.size()) {
        RawBytes & bytes = state_->bytes();
        const bool is_state = of.name == "state";
        std::copy_n(from, of.bytes, bytes.data() + (is_state ? 0 : bytes.size() - of.bytes));
        return;
    }
    for (const auto & rows : rows_[of.cache]) {
        rows->write(of.tensor, from);
        from += rows->n() * ggml_row_size(of.type, of.ne[0]);
    }
}

// ---- engines and sequences

std::vector<KvGroup *> Engine::caches() {
    std::vector<KvGroup *> found;
    for (KvGroup & group : kv_.groups()) {
        found.push_back(&group);
    }
    if (draft_) {
        found.push_back(&draft_->cache());
    }
    return found;
}

bool Engine::is_drafters(size_t cache) const {
    return draft_ != nullptr && cache == kv_.groups().size();
}

bool Engine::shares(size_t cache) const {
    return cache == 0 && kv_.groups().front().shares_pages();
}

bool Engine::goes_anywhere() const { return !recurs_ && !kv_.forgets(); }

int64_t Engine::most_kept(size_t cache, int64_t n) const {
    return is_drafters(cache) ? std::min(n, draft_->window())
                              : n - kv_.groups()[cache].first_saved(n);
}

int64_t Engine::least_kept(size_t cache, int64_t n) const {
    return is_drafters(cache) ? 0 : most_kept(cache, n);
}

bool Engine::spill(int64_t n_cells, uint64_t n_bytes, const Prefix * spared) {
    std::unordered_set<const KeptRows *> stay;
    if (spared != nullptr) {
        for (const auto & rows : spared->rows()[0]) {
            stay.insert(rows.get());
        }
    }
    KvGroup & group = kv_.groups().front();
    std::vector<KeptRows *> idle;
    for (const auto & [page, rows] : group.kept_in_pages()) {
        if (rows->is_idle() && stay.count(rows) == 0) {
            idle.push_back(rows);
        }
    }
    std::sort(idle.begin(), idle.end(), [](const KeptRows * a, const KeptRows * b) {
        return a->last_used() != b->last_used() ? a->last_used() < b->last_used()
                                                : a->position() > b->position();
    });
    const uint64_t page_bytes = PAGE * group.row_bytes();
    for (KeptRows * rows : idle) {
        if (n_cells <= 0) {
            break;
        }
        if (n_bytes < page_bytes) {
            return false;
        }
        rows->spill();
        n_cells -= PAGE;
        n_bytes -= page_bytes;
    }
    return true;
}

void Engine::settle_features(int32_t slot) {
    if (draft_ && draft_->has_pending(slot)) {
        forget_rows(); // the injection reuses the arena their logits lie in
        draft_->flush(graphs_);
    }
}

// What a prefix keeps of a cache: rows that are kept already, or lie in a shared page, or are to be
// copied.
static constexpr int64_t COPIED = -1, TO_BE_SHARED = -2;

struct Sequence::Wanted {
    int32_t position;
    int64_t n;
    std::shared_ptr<KeptRows> known;
    int64_t page; // or one of these two
};

std::vector<Sequence::Wanted> Sequence::wanted_rows(size_t cache) const {
    const KvGroup & group = *engine_->caches()[cache];
    const std::vector<cpu::CellSpan> & spans = group.cells().spans(slot_);
    // The last rows without a gap, those among them that the drafter has yet to take in.
    int64_t first = position() - (engine_->is_drafters(cache) ? draft_->n_pending(slot_) : 0);
    for (auto span = spans.rbegin(); span != spans.rend() && span->position + span->n >= first;
         ++span) {
        first = std::min(first, span->position);
    }
    first = std::max(first, position() - engine_->most_kept(cache, position()));
    std::vector<Wanted> wanted;
    const std::vector<int64_t> & shared = group.cells().shared(slot_);
    for (int64_t at = first; at < position();) {
        const int64_t index = at / PAGE, end = std::min((index + 1) * PAGE, position());
        const auto known = known_[cache].find(index);
        Wanted one = {static_cast<int32_t>(at), end - at, nullptr, COPIED};
        if (known != known_[cache].end()) {
            one.known = known->second.lock();
        }
        if (one.known == nullptr && end - at == PAGE && engine_->shares(cache)) {
            one.page = index < static_cast<int64_t>(shared.size()) ? shared[index] : TO_BE_SHARED;
            // Another sequence that began alike may have kept them.
            const auto kept = group.kept_in_pages().find(one.page);
            if (kept != group.kept_in_pages().end()) {
                one.known = kept->second->shared_from_this();
            }
        }
        wanted.push_back(std::move(one));
        at = end;
    }
    return wanted;
}

uint64_t Sequence::cost_of_keeping() const {
    uint64_t sum = engine_->recurs() ? recurrent_.sequence_bytes() : 0;
    for (size_t i = 0; i < known_.size(); ++i) {
        for (const Wanted & one : wanted_rows(i)) {
            const bool is_copied = one.known == nullptr && one.page == COPIED;
            sum += is_copied ? one.n * engine_->caches()[i]->row_bytes() : 0;
        }
    }
    return sum;
}

void Sequence::forget_known(int64_t position) {
    for (auto & cache : known_) {
        cache.erase(cache.lower_bound(position / PAGE), cache.end());
    }
}

std::shared_ptr<Prefix> Sequence::keep() {
    check_no_open_verify();
    DFL_CHECK(position() > 0, DFL_STATUS_ARGUMENT, "the sequence holds no tokens to keep");
    prove();
    if (n_proven_ < position() && position() > 1 && engine_->goes_anywhere()) {
        // A prompt was cut short, and no row of it was read: only what is proven can be divided.
        const int32_t last = tokens_.back();
        forget_from(position() - 1);
        prefill(&last, 1, nullptr, nullptr);
        prove();
    }
    engine_->settle_features(slot_);
    std::vector<CacheRows> kept;
    for (size_t i = 0; i < known_.size(); ++i) {
        KvGroup & group = *engine_->caches()[i];
        if (engine_->shares(i)) {
            group.cells().share(slot_, position() / PAGE);
        }
        kept.emplace_back();
        for (Wanted & one : wanted_rows(i)) {
            std::shared_ptr<KeptRows> rows = std::move(one.known);
            if (rows == nullptr && one.page >= 0) {
                rows = std::make_shared<KeptRows>(group, engine_->kept_bytes(), one.page);
            } else if (rows == nullptr) {
                rows = std::make_shared<KeptRows>(group, engine_->kept_bytes(), one.position, one.n,
                                                  slot_);
            }
            if (rows->is_whole()) {
                known_[i][one.position / PAGE] = rows;
            }
            kept.back().push_back(std::move(rows));
        }
    }
    std::shared_ptr<PrefixState> state;
    if (engine_->recurs()) {
        state = std::make_shared<PrefixState>(recurrent_.save(slot_), engine_->kept_bytes());
    }
    auto prefix = std::make_shared<Prefix>(engine_, tokens_, n_proven_, std::move(kept), state);
    prefix->was_used(position(), engine_->next_use());
    return prefix;
}

void Sequence::adopt(const Prefix & prefix, int64_t n) {
    DFL_CHECK(&prefix.engine() == engine_.get(), DFL_STATUS_ARGUMENT,
              "the prefix of %lld tokens is of another engine", (long long)prefix.size());
    DFL_CHECK(n >= 1 && n <= prefix.size(), DFL_STATUS_ARGUMENT, "%lld tokens of a prefix of %lld",
              (long long)n, (long long)prefix.size());
    const bool holds = position() >= n &&
                       std::equal(tokens_.begin(), tokens_.begin() + n, prefix.tokens().begin());
    DFL_CHECK((position() == 0 || holds) && open_.n == 0, DFL_STATUS_ARGUMENT,
              "the sequence holds %lld tokens, it must be empty or begin with those of the prefix",
              (long long)position());
    DFL_CHECK(n == prefix.size() || engine_->goes_anywhere(), DFL_STATUS_UNSUPPORTED,
              "a model with recurrent layers or windows takes a prefix whole: %lld tokens of %lld",
              (long long)n, (long long)prefix.size());
    prefix.was_used(n, engine_->next_use());
    if (holds && go_back_to(prefix, n)) {
        return;
    }
    if (position() > 0) {
        reset();
    }
    const int64_t wanted = prefix.wanted_cells(n), free = kv_.cells().n_unclaimed();
    DFL_CHECK(wanted <= free, DFL_STATUS_ARGUMENT,
              "a prefix of %lld tokens needs %lld more cells, and %lld are free", (long long)n,
              (long long)wanted, (long long)free);
    try {
        for (size_t i = 0; i < known_.size(); ++i) {
            begin_with(i, prefix.rows()[i], n);
        }
        if (engine_->recurs()) {
            recurrent_.load(slot_, prefix.state()->bytes());
        }
    } catch (...) {
        reset();
        throw;
    }
    tokens_.assign(prefix.tokens().begin(), prefix.tokens().begin() + n);
    n_proven_ = std::min(n, prefix.n_proven());
    passes_.clear();
}

bool Sequence::go_back_to(const Prefix & prefix, int64_t n) {
    if (n == position()) {
        return true; // states are those of its last token
    }
    prove();
    // What was not proven may have been spoiled by what came behind it in a pass.
    bool can = n == prefix.size() || n <= n_proven_;
    for (const KvGroup & group : kv_.groups()) {
        can = can && group.cells().can_release_from(slot_, static_cast<int32_t>(n));
    }
    if (!can) {
        return false;
    }
    forget_from(n);
    try {
        for (size_t i = 0; i < known_.size(); ++i) {
            // Layers with a window, and the drafter, may have forgotten rows that the prefix has.
            const CacheRows & kept = prefix.rows()[i];
            KvGroup & group = *engine_->caches()[i];
            const std::vector<cpu::CellSpan> & spans = group.cells().spans(slot_);
            if (!kept.empty() &&
                (spans.empty() || spans.front().position > kept.front()->position())) {
                if (engine_->is_drafters(i)) { // features that wait are of the same positions
                    draft_->truncate(slot_, 0);
                } else {
                    group.release_from(slot_, 0);
                }
                begin_with(i, kept, n);
            }
        }
        if (engine_->recurs()) {
            recurrent_.load(slot_, prefix.state()->bytes());
        }
    } catch (...) {
        reset();
        throw;
    }
    return true;
}

void Sequence::begin_with(size_t cache, const CacheRows & kept, int64_t n) {
    KvGroup & group = *engine_->caches()[cache];
    const int64_t first = n - engine_->most_kept(cache, n);
    if (engine_->is_drafters(cache)) {
        draft_->make_room({{slot_, n - first}});
    }
    std::vector<int64_t> pages;
    for (const auto & rows : kept) {
        const int64_t here = std::min(rows->n(), n - rows->position());
        if (here <= 0 || rows->position() + here <= first) {
            continue;
        }
        if (here == PAGE) {
            known_[cache][rows->position() / PAGE] = rows;
        }
        if (here == PAGE && engine_->shares(cache)) {
            rows->bring_back();
            pages.push_back(rows->page());
            continue;
        }
        if (!pages.empty()) {
            group.cells().begin_with(slot_, pages);
            pages.clear();
        }
        const std::vector<int64_t> cells = group.cells().take(slot_, here);
        for (int64_t j = 0; j < here; ++j) {
            group.cells().place(cells[j], rows->position() + static_cast<int32_t>(j));
        }
        rows->copy_to(cells);
    }
    if (!pages.empty()) {
        group.cells().begin_with(slot_, pages);
    }
}

} // namespace dfl
