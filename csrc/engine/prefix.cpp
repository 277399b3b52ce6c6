#include "engine/prefix.h"

#include "engine/sequence.h"
#include "error.h"

#include <algorithm>

namespace dfl {

static constexpr int64_t PAGE = CellTable::PAGE;

PrefixState::PrefixState(RawBytes bytes, uint64_t & host_bytes)
    : bytes_(std::move(bytes)), host_bytes_(host_bytes) {
    host_bytes_ += bytes_.size();
}

Prefix::Prefix(std::shared_ptr<Engine> engine, std::vector<int32_t> tokens,
               std::vector<CacheBlocks> blocks, std::shared_ptr<PrefixState> state)
    : engine_(std::move(engine)), tokens_(std::move(tokens)), blocks_(std::move(blocks)),
      own_(blocks_), state_(std::move(state)) {
    find_parts();
}

// Returns the block of rows [position, position + n) in a K/V group of prefix `base`, or NULL.
static std::shared_ptr<KvBlock> find_block(const Prefix * base, size_t cache, int64_t position,
                                           int64_t n) {
    if (base != nullptr) {
        for (const auto & block : base->blocks()[cache]) {
            if (block->position() == position && block->n() == n) {
                return block;
            }
        }
    }
    return nullptr;
}

void Prefix::check_base(const Prefix & base) const {
    DFL_CHECK(base.engine_ == engine_ && base.size() > size() &&
                  std::equal(tokens_.begin(), tokens_.end(), base.tokens_.begin()),
              DFL_STATUS_ARGUMENT,
              "the base of a prefix of %lld tokens has %lld tokens, it must be a longer prefix of "
              "the same text and engine",
              (long long)size(), (long long)base.size());
}

Prefix::Prefix(const Prefix & of, const Prefix & base)
    : engine_(of.engine_), tokens_(of.tokens_), blocks_(of.blocks_), state_(of.state_) {
    check_base(base);
    own_.resize(blocks_.size());
    for (size_t i = 0; i < blocks_.size(); ++i) {
        for (const auto & block : blocks_[i]) {
            if (find_block(&base, i, block->position(), block->n()) == nullptr) {
                own_[i].push_back(block);
            }
        }
    }
    find_parts();
}

Prefix::Prefix(std::shared_ptr<Engine> engine, std::vector<int32_t> tokens,
               const std::vector<int64_t> & n_rows, const Prefix * base)
    : engine_(std::move(engine)), tokens_(std::move(tokens)) {
    if (base != nullptr) {
        check_base(*base);
    }
    const std::vector<CacheGroup> & caches = engine_->caches();
    DFL_CHECK(n_rows.size() == caches.size(), DFL_STATUS_ARGUMENT,
              "the prefix has %zu K/V groups, the engine has %zu", n_rows.size(), caches.size());
    for (size_t i = 0; i < caches.size(); ++i) {
        const int64_t max_rows = std::min(size(), engine_->max_snapshot_rows(i, size()) + PAGE - 1);
        DFL_CHECK(n_rows[i] <= max_rows && n_rows[i] >= engine_->min_snapshot_rows(i, size()),
                  DFL_STATUS_ARGUMENT,
                  "there are %lld rows in K/V group %zu of a prefix of %lld tokens, expected %lld",
                  (long long)n_rows[i], i, (long long)size(), (long long)max_rows);
        blocks_.emplace_back();
        own_.emplace_back();
        for (int64_t at = size() - n_rows[i]; at < size();) {
            const int64_t n = std::min(size(), (at / PAGE + 1) * PAGE) - at;
            std::shared_ptr<KvBlock> block = find_block(base, i, at, n);
            if (block == nullptr) {
                block = std::make_shared<KvBlock>(*caches[i].rows, engine_->prefix_bytes(),
                                                  static_cast<int32_t>(at), n);
                own_.back().push_back(block);
            }
            blocks_.back().push_back(std::move(block));
            at += n;
        }
    }
    if (engine_->is_recurrent()) {
        RawBytes zeros(engine_->recurrent().sequence_bytes(), 0);
        state_ = std::make_shared<PrefixState>(std::move(zeros), engine_->prefix_bytes());
    }
    find_parts();
}

static int64_t rows_of(const CacheBlocks & blocks) {
    int64_t n = 0;
    for (const auto & block : blocks) {
        n += block->n();
    }
    return n;
}

void Prefix::find_parts() {
    const std::vector<CacheGroup> & caches = engine_->caches();
    for (size_t i = 0; i < caches.size(); ++i) {
        const std::vector<ggml_tensor *> & tensors = caches[i].rows->tensors();
        const DraftModel * draft = caches[i].draft;
        const std::string owner = draft == nullptr      ? ""
                                  : draft->index() == 0 ? "draft."
                                                        : format("draft%zu.", draft->index());
        const int64_t n = rows_of(own_[i]);
        for (size_t j = 0; n > 0 && j < tensors.size(); ++j) {
            parts_.push_back({owner + tensors[j]->name,
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

int64_t Prefix::n_rows(size_t cache) const { return rows_of(blocks_[cache]); }

int64_t Prefix::n_draft() const {
    int64_t n = 0;
    for (size_t i = 0; i < blocks_.size(); ++i) {
        n = engine_->caches()[i].draft != nullptr ? std::max(n, n_rows(i)) : n;
    }
    return n;
}

int64_t Prefix::cells_needed(int64_t n) const {
    if (!engine_->shares_pages(0)) {
        return (n + PAGE - 1) / PAGE * PAGE;
    }
    int64_t n_needed = n % PAGE > 0 ? PAGE : 0;
    for (int64_t i = 0; i < n / PAGE; ++i) {
        n_needed += blocks_[0][i]->page() < 0 ? PAGE : 0;
    }
    return n_needed;
}

void Prefix::keep_in_cells(bool keeps) {
    for (const auto & block : blocks_[0]) {
        block->n_keepers += keeps - keeps_in_cells_;
    }
    keeps_in_cells_ = keeps;
}

uint8_t * Prefix::state_bytes(const Part & part) const {
    RawBytes & bytes = state_->bytes();
    return bytes.data() + (part.name == "state" ? 0 : bytes.size() - part.bytes);
}

void Prefix::read(size_t part, uint8_t * to) const {
    const Part & of = parts_[part];
    if (of.cache == blocks_.size()) {
        std::copy_n(state_bytes(of), of.bytes, to);
        return;
    }
    for (const auto & block : own_[of.cache]) {
        block->read(of.tensor, to);
        to += block->n() * ggml_row_size(of.type, of.ne[0]);
    }
}

void Prefix::write(size_t part, const uint8_t * from) {
    const Part & of = parts_[part];
    if (of.cache == blocks_.size()) {
        std::copy_n(from, of.bytes, state_bytes(of));
        return;
    }
    for (const auto & block : own_[of.cache]) {
        block->write(of.tensor, from);
        from += block->n() * ggml_row_size(of.type, of.ne[0]);
    }
}

// ---- prefixes in Engine and Sequence

bool Engine::shares_pages(size_t cache) const {
    return cache == 0 && kv_.groups().front().shares_pages();
}

bool Engine::partial_prefix_ok() const { return !is_recurrent_ && !kv_.has_windows(); }

int64_t Engine::max_snapshot_rows(size_t cache, int64_t n) const {
    const CacheGroup & of = caches_[cache];
    return of.draft != nullptr ? std::min(n, of.draft->window()) : n - of.rows->first_saved(n);
}

int64_t Engine::min_snapshot_rows(size_t cache, int64_t n) const {
    return caches_[cache].draft != nullptr ? 0 : max_snapshot_rows(cache, n);
}

bool Engine::offload(int64_t n_cells, uint64_t n_bytes) {
    KvGroup & group = kv_.groups().front();
    const uint64_t page_bytes = PAGE * group.row_bytes();
    std::vector<KvBlock *> idle;
    for (const auto & [page, block] : group.blocks_by_page()) {
        if (block->is_idle() && block->n_keepers == 0) {
            idle.push_back(block);
        }
    }
    for (auto block = idle.rbegin(); block != idle.rend() && n_cells > 0; ++block) {
        if (n_bytes < page_bytes) {
            return false;
        }
        (*block)->page_out();
        n_cells -= PAGE;
        n_bytes -= page_bytes;
    }
    return true;
}

void Engine::catch_up(int32_t slot) {
    for (const auto & draft : drafts_) {
        if (draft->n_pending(slot) > 0) {
            forget_rows(); // the drafter's pass overwrites the arena, which holds readable logits
            draft->catch_up();
        }
    }
}

// Values of BlockSource::page for rows in no shared page: COPIED if a snapshot copies the rows,
// TO_BE_SHARED if it first turns the page that holds them into a shared page.
static constexpr int64_t COPIED = -1, TO_BE_SHARED = -2;

struct Sequence::BlockSource {
    int32_t position;
    int64_t n;
    std::shared_ptr<KvBlock> block;
    int64_t page;
};

std::vector<Sequence::BlockSource> Sequence::block_sources(size_t cache) const {
    const DraftModel * draft = engine_->caches()[cache].draft;
    const KvGroup & group = *engine_->caches()[cache].rows;
    const std::vector<cpu::CellSpan> & spans = group.cells().spans(slot_);
    // Finds the position from which on no K/V row is missing. Features that wait for the drafter
    // to compute their K/V count as rows.
    int64_t first = position() - (draft != nullptr ? draft->n_pending(slot_) : 0);
    for (auto span = spans.rbegin(); span != spans.rend() && span->position + span->n >= first;
         ++span) {
        first = std::min(first, span->position);
    }
    first = std::max(first, position() - engine_->max_snapshot_rows(cache, position()));
    std::vector<BlockSource> n_needed;
    const std::vector<int64_t> & shared = group.cells().shared(slot_);
    for (int64_t at = first; at < position();) {
        const int64_t index = at / PAGE, end = std::min((index + 1) * PAGE, position());
        const auto block = blocks_[cache].find(index);
        BlockSource one = {static_cast<int32_t>(at), end - at, nullptr, COPIED};
        if (block != blocks_[cache].end()) {
            one.block = block->second.lock();
        }
        if (one.block == nullptr && end - at == PAGE && engine_->shares_pages(cache)) {
            one.page = index < static_cast<int64_t>(shared.size()) ? shared[index] : TO_BE_SHARED;
            // Another sequence that shares the page may have made it a K/V block by a snapshot.
            const auto by_page = group.blocks_by_page().find(one.page);
            if (by_page != group.blocks_by_page().end()) {
                one.block = by_page->second->shared_from_this();
            }
        }
        n_needed.push_back(std::move(one));
        at = end;
    }
    return n_needed;
}

uint64_t Sequence::snapshot_bytes() const {
    uint64_t sum = engine_->is_recurrent() ? recurrent_.sequence_bytes() : 0;
    for (size_t i = 0; i < blocks_.size(); ++i) {
        for (const BlockSource & one : block_sources(i)) {
            const bool is_copied = one.block == nullptr && one.page == COPIED;
            sum += is_copied ? one.n * engine_->caches()[i].rows->row_bytes() : 0;
        }
    }
    return sum;
}

void Sequence::forget_blocks(int64_t position) {
    for (auto & cache : blocks_) {
        cache.erase(cache.lower_bound(position / PAGE), cache.end());
    }
}

std::shared_ptr<Prefix> Sequence::snapshot() {
    check_no_pending_verify();
    DFL_CHECK(position() > 0, DFL_STATUS_ARGUMENT, "the sequence holds no tokens for a snapshot");
    engine_->catch_up(slot_);
    std::vector<CacheBlocks> blocks;
    for (size_t i = 0; i < blocks_.size(); ++i) {
        KvGroup & group = *engine_->caches()[i].rows;
        if (engine_->shares_pages(i)) {
            group.cells().share(slot_, position() / PAGE);
        }
        blocks.emplace_back();
        for (BlockSource & one : block_sources(i)) {
            std::shared_ptr<KvBlock> block = std::move(one.block);
            if (block == nullptr && one.page >= 0) {
                block = std::make_shared<KvBlock>(group, engine_->prefix_bytes(), one.page);
            } else if (block == nullptr) {
                block = std::make_shared<KvBlock>(group, engine_->prefix_bytes(), one.position,
                                                  one.n, slot_);
            }
            if (block->is_full()) {
                blocks_[i][one.position / PAGE] = block;
            }
            blocks.back().push_back(std::move(block));
        }
    }
    std::shared_ptr<PrefixState> state;
    if (engine_->is_recurrent()) {
        state = std::make_shared<PrefixState>(recurrent_.save(slot_), engine_->prefix_bytes());
    }
    return std::make_shared<Prefix>(engine_, tokens_, std::move(blocks), state);
}

void Sequence::restore(const Prefix & prefix, int64_t n) {
    DFL_CHECK(&prefix.engine() == engine_.get(), DFL_STATUS_ARGUMENT,
              "the prefix of %lld tokens belongs to another engine", (long long)prefix.size());
    DFL_CHECK(n >= 1 && n <= prefix.size(), DFL_STATUS_ARGUMENT,
              "the number of tokens to restore from the prefix is %lld, expected 1 to %lld",
              (long long)n, (long long)prefix.size());
    check_no_pending_verify();
    const bool holds = position() >= n &&
                       std::equal(tokens_.begin(), tokens_.begin() + n, prefix.tokens().begin());
    DFL_CHECK(position() == 0 || holds, DFL_STATUS_ARGUMENT,
              "the sequence holds %lld tokens, it must be empty or begin with those of the prefix",
              (long long)position());
    DFL_CHECK(n == prefix.size() || engine_->partial_prefix_ok(), DFL_STATUS_UNSUPPORTED,
              "a model with recurrent layers or windows restores whole prefixes only, not %lld of "
              "%lld tokens",
              (long long)n, (long long)prefix.size());
    last_ = nullptr;
    if (holds && n == position()) {
        return; // nothing to restore: the sequence already ends at position n
    }
    const bool is_in_place =
        holds && std::all_of(kv_.groups().begin(), kv_.groups().end(), [&](const KvGroup & group) {
            return group.cells().can_release_from(slot_, static_cast<int32_t>(n));
        });
    if (is_in_place) {
        forget_from(n);
    } else if (position() > 0) {
        reset();
    }
    const int64_t n_needed = is_in_place ? 0 : prefix.cells_needed(n);
    const int64_t n_free = kv_.cells().n_unclaimed();
    DFL_CHECK(n_needed <= n_free, DFL_STATUS_ARGUMENT,
              "a prefix of %lld tokens needs %lld more K/V cells, and %lld are free", (long long)n,
              (long long)n_needed, (long long)n_free);
    try {
        for (size_t i = 0; i < blocks_.size(); ++i) {
            // Groups of window layers and of drafters may have dropped rows that the prefix still
            // has.
            const CacheBlocks & blocks = prefix.blocks()[i];
            KvGroup & group = *engine_->caches()[i].rows;
            const std::vector<cpu::CellSpan> & spans = group.cells().spans(slot_);
            if (!blocks.empty() &&
                (spans.empty() || spans.front().position > blocks.front()->position())) {
                if (DraftModel * draft = engine_->caches()[i].draft) {
                    draft->truncate(slot_, 0);
                } else {
                    group.release_from(slot_, 0);
                }
                attach_blocks(i, blocks, n);
            }
        }
        if (engine_->is_recurrent()) {
            recurrent_.load(slot_, prefix.state()->bytes());
        }
    } catch (...) {
        reset();
        throw;
    }
    tokens_.assign(prefix.tokens().begin(), prefix.tokens().begin() + n);
}

void Sequence::attach_blocks(size_t cache, const CacheBlocks & blocks, int64_t n) {
    KvGroup & group = *engine_->caches()[cache].rows;
    const int64_t first = n - engine_->max_snapshot_rows(cache, n);
    const auto rows_in = [&](const KvBlock & block) {
        const int64_t n_rows = std::min(block.n(), n - block.position());
        return block.position() + n_rows > first ? n_rows : 0;
    };
    if (DraftModel * draft = engine_->caches()[cache].draft) {
        int64_t n_rows = 0; // may exceed n - first, as blocks are attached whole
        for (const auto & block : blocks) {
            n_rows += std::max<int64_t>(0, rows_in(*block));
        }
        draft->make_room({{slot_, n_rows}});
    }
    std::vector<int64_t> pages;
    for (const auto & block : blocks) {
        const int64_t here = rows_in(*block);
        if (here <= 0) {
            continue;
        }
        if (here == PAGE) {
            blocks_[cache][block->position() / PAGE] = block;
        }
        if (here == PAGE && engine_->shares_pages(cache)) {
            block->page_in();
            pages.push_back(block->page());
            continue;
        }
        if (!pages.empty()) {
            group.cells().attach_pages(slot_, pages);
            pages.clear();
        }
        const std::vector<int64_t> cells = group.cells().take(slot_, here);
        for (int64_t j = 0; j < here; ++j) {
            group.cells().place(cells[j], block->position() + static_cast<int32_t>(j));
        }
        block->copy_to(cells);
    }
    if (!pages.empty()) {
        group.cells().attach_pages(slot_, pages);
    }
}

} // namespace dfl
