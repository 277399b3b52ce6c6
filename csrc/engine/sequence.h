// A sequence in an engine: its tokens, a pending verify, and the rows of the last pass.
#pragma once

#include "engine/engine.h"
#include "engine/prefix.h"
#include "error.h"
#include "sampling/sampler.h"

#include <map>
#include <memory>
#include <vector>

namespace dfl {

class Sequence {
  public:
    // Throws DFL_STATUS_UNSUPPORTED where an engine has no free slot.
    explicit Sequence(std::shared_ptr<Engine> engine);
    ~Sequence();
    Sequence(const Sequence &) = delete; // its engine knows it
    Sequence & operator=(const Sequence &) = delete;

    Engine & engine() const { return *engine_; }
    int64_t position() const { return static_cast<int64_t>(tokens_.size()); }
    const std::vector<int32_t> & tokens() const { return tokens_; }
    // Number of free cells that n more tokens take.
    int64_t cells_needed(int64_t n) const { return kv_.cells().cells_needed(slot_, n); }

    // Rows of the last pass whose logits can be read: 1 after an append, n after a verify; 0 once
    // the engine has run another.
    int64_t n_out_rows() const {
        return last_ != nullptr ? static_cast<int64_t>(finite_.size()) : 0;
    }
    // Number of the first of them among all rows of the sequence so far.
    int64_t first_row() const { return first_row_; }
    // Throws DFL_STATUS_ARGUMENT for a row that is not there, and DFL_STATUS_COMPUTE for one with a
    // NaN or +inf: its caches are then no better, so the sequence has forgotten all and zeroed
    // them.
    void check_row(int64_t row);
    // The same of the last append, also where its row cannot be read.
    void check_append();
    // Token with the largest logit of a row, lowest id on ties (host devices). This and the one
    // below throw as check_row() does.
    int32_t argmax(int64_t row);
    // A row's logits: dst [n_vocab].
    void logits(int64_t row, float * dst);
    // Samples the token for a position from a row, among those whose bits are set in `mask`, or all
    // if that is NULL. False, and nothing is forgotten, where the row has nothing to sample from or
    // is not finite; reading it says why. Throws DFL_STATUS_ARGUMENT for a mask without any bit.
    bool sample(int64_t row, const Sampler & sampler, TokenHistory history, int64_t position,
                const uint32_t * mask, int32_t & token);

    // Back to position 0.
    void reset();

    // Takes a snapshot of all its tokens, for others that begin alike; the rows of the last pass
    // may be gone. snapshot_bytes(): bytes that it would take on the host.
    std::shared_ptr<Prefix> snapshot();
    uint64_t snapshot_bytes() const;
    // Attaches the first n tokens of a prefix to an empty sequence, or to one that begins with them
    // already and is rewound to them; its own cells of them stay. Throws
    // DFL_STATUS_ARGUMENT where it needs more cells than are free, and DFL_STATUS_UNSUPPORTED for a
    // part of a prefix where the engine takes them whole.
    void restore(const Prefix & prefix, int64_t n);

    // ---- for the engine

    int32_t slot() const { return slot_; }
    void check_no_pending_verify() const;
    void forget_rows() { last_ = nullptr; }
    // A pass has run its rows: they join the timeline if all are finite, or wait for a commit.
    void appended(const PassEntry & entry, const int32_t * tokens, CachedGraph & cached);
    void verified(PassEntry entry, CachedGraph & cached);
    // A pass with its rows has failed. may_have_moved: recurrent states.
    void failed(const PassEntry & entry, bool may_have_moved);
    const PassEntry & pending_verify() const { return pending_verify_; }
    // Appends the nodes of a path of the pending verify; recurrent states have moved already.
    void accept(const int32_t * nodes, int64_t n);
    // Throws as check_row() does, for a row that is known to be finite or not.
    void check_finite(int64_t row, bool is_finite);

  private:
    // The rows of a pass that can be read.
    void set_rows(CachedGraph & cached, int64_t first_out, std::vector<bool> finite);
    // Set the best token of a row, or the candidates that the device selected; return false for a
    // row that is not finite.
    bool find_argmax(int64_t row, int32_t & token);
    bool find_top(int64_t row, const Candidate *& best);
    // Forgets all tokens and zeroes their cells: some kernels multiply hidden cells by 0.
    void reset_and_zero();
    // Keeps the features of the last tokens for drafters.
    void add_features(const std::vector<int64_t> & rows);
    void close_verify();
    void forget_from(int64_t position);
    struct BlockSource;
    std::vector<BlockSource> block_sources(size_t cache) const;
    void attach_blocks(size_t cache, const CacheBlocks & blocks, int64_t n);
    // Forgets blocks that it shares with prefixes from a position on.
    void forget_blocks(int64_t position);

    std::shared_ptr<Engine> engine_;
    KvCache & kv_; // K/V of the engine
    RecurrentCache & recurrent_;
    int32_t slot_;                // number of the sequence in the caches
    std::vector<int32_t> tokens_; // the committed timeline
    // Of each cache, by page index: blocks of this sequence that prefixes have.
    std::vector<std::map<int64_t, std::weak_ptr<KvBlock>>> blocks_;
    CachedGraph * last_ = nullptr; // graph whose logits are readable
    int64_t first_out_ = 0;        // first readable row of that graph
    std::vector<bool> finite_;     // flags of the readable rows
    int64_t first_row_ = 0;        // number of the first of these
    PassEntry pending_verify_;     // rows of a verify that waits for its commit
};

template <typename Of>
void Engine::check_sequences(const char * what, const std::vector<Of> & those) const {
    for (size_t i = 0; i < those.size(); ++i) {
        DFL_CHECK(&those[i].sequence->engine() == this, DFL_STATUS_ARGUMENT,
                  "%s: number %zu is of a sequence of another engine", what, i);
        for (size_t j = 0; j < i; ++j) {
            DFL_CHECK(those[j].sequence != those[i].sequence, DFL_STATUS_ARGUMENT,
                      "%s %zu and %zu are of one sequence", what, j, i);
        }
    }
}

} // namespace dfl
