// A sequence in an engine: its tokens, its pending verify, and its readable rows of the last pass.
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
    // Throws DFL_STATUS_UNSUPPORTED if the engine has no free slot.
    explicit Sequence(std::shared_ptr<Engine> engine);
    ~Sequence();
    Sequence(const Sequence &) = delete;
    Sequence & operator=(const Sequence &) = delete;

    Engine & engine() const { return *engine_; }
    int64_t position() const { return static_cast<int64_t>(tokens_.size()); }
    const std::vector<int32_t> & tokens() const { return tokens_; }
    // Returns the number of free cells that n more tokens take.
    int64_t cells_needed(int64_t n) const { return kv_.cells().cells_needed(slot_, n); }

    // Returns the number of rows that can be read until the next pass or draft of the engine.
    int64_t n_out_rows() const {
        return last_ != nullptr ? static_cast<int64_t>(finite_.size()) : 0;
    }
    // Returns the index of the first readable row among all rows that were ever readable.
    int64_t first_row() const { return first_row_; }
    // Throws DFL_STATUS_ARGUMENT for a row that is not readable. For a row with NaN or +inf,
    // empties the sequence, zeroes its caches and throws DFL_STATUS_COMPUTE.
    void check_row(int64_t row);
    // Throws DFL_STATUS_COMPUTE if a row of the last append, readable or not, has NaN or +inf.
    void check_append();
    // Returns a row's most probable token. Throws if the row is not finite or not readable.
    int32_t argmax(int64_t row);
    // Copies logits of rows to dst, [n][n_vocab]. Throws if a row is not finite or not readable.
    void logits(const std::vector<int64_t> & rows, float * dst);
    // Samples the token for a position from a row. mask: bits of allowed tokens; NULL: all. False
    // if the row is not finite or no token is left. Throws DFL_STATUS_ARGUMENT for an empty mask.
    bool sample(int64_t row, const Sampler & sampler, TokenHistory history, int64_t position,
                const uint32_t * mask, int32_t & token);

    void reset();

    // Takes a snapshot of all tokens. Readable rows of the last pass may be lost.
    std::shared_ptr<Prefix> snapshot();
    uint64_t snapshot_bytes() const;
    // Restores the first n tokens of a prefix, as dfl_sequence_restore() describes.
    void restore(const Prefix & prefix, int64_t n);

    // ---- methods used by Engine

    int32_t slot() const { return slot_; }
    void check_no_pending_verify() const;
    void forget_rows() { last_ = nullptr; }
    // Appends the tokens of a completed pass, or empties the sequence if a row is not finite.
    void appended(const PassEntry & entry, const int32_t * tokens, CachedGraph & cached);
    void verified(PassEntry entry, CachedGraph & cached);
    // Cleans up after a failed pass. may_have_moved: true if recurrent states may have advanced.
    void failed(const PassEntry & entry, bool may_have_moved);
    const PassEntry & pending_verify() const { return pending_verify_; }
    // Appends accepted nodes of the pending verify. Their recurrent states must be promoted before.
    void accept(const int32_t * nodes, int64_t n);
    // Empties the sequence and throws DFL_STATUS_COMPUTE if is_finite is false.
    void check_finite(int64_t row, bool is_finite);

  private:
    // Makes finite.size() rows readable: the rows of the graph's logits from first_out on.
    void set_rows(CachedGraph & cached, int64_t first_out, std::vector<bool> finite);
    // Finds the best token of a row. False if the row is not finite.
    bool find_argmax(int64_t row, int32_t & token);
    // Finds the candidates that the device selected from a row. False if the row is not finite.
    bool find_top(int64_t row, const Candidate *& best);
    // Returns the logits of a row on the host, [n_vocab]; other rows may move.
    float * whole_row(int64_t row);
    // Empties the sequence and zeroes its cells: kernels that multiply masked cells by 0 keep NaN.
    void reset_and_zero();
    // Queues the features of the last tokens for the drafters. rows: rows of the feature ring.
    void add_features(const std::vector<int64_t> & rows);
    void close_verify();
    void forget_from(int64_t position);
    struct BlockSource;
    std::vector<BlockSource> block_sources(size_t cache) const;
    void attach_blocks(size_t cache, const CacheBlocks & blocks, int64_t n);
    void forget_blocks(int64_t position);

    std::shared_ptr<Engine> engine_;
    KvCache & kv_;
    RecurrentCache & recurrent_;
    int32_t slot_;
    std::vector<int32_t> tokens_;
    // Blocks that prefixes share with the sequence: for each K/V group a map by page index.
    std::vector<std::map<int64_t, std::weak_ptr<KvBlock>>> blocks_;
    CachedGraph * last_ = nullptr; // graph with the readable logits; NULL: none
    int64_t first_out_ = 0;        // index of the first readable row in the graph's logits
    std::vector<float> fetched_;   // logits that were read from a device, [n_fetched_][n_vocab]
    std::vector<float> masked_;    // copy of a row without forbidden tokens, [n_vocab]
    int64_t first_fetched_ = 0, n_fetched_ = 0;
    std::vector<bool> finite_; // True for each readable row whose logits are finite
    int64_t first_row_ = 0;
    PassEntry pending_verify_;
};

template <typename Of>
void Engine::check_sequences(const char * what, const std::vector<Of> & those) const {
    for (size_t i = 0; i < those.size(); ++i) {
        DFL_CHECK(&those[i].sequence->engine() == this, DFL_STATUS_ARGUMENT,
                  "%s: the sequence of number %zu belongs to another engine", what, i);
        for (size_t j = 0; j < i; ++j) {
            DFL_CHECK(those[j].sequence != those[i].sequence, DFL_STATUS_ARGUMENT,
                      "%s %zu and %zu have the same sequence, it may occur only once", what, j, i);
        }
    }
}

} // namespace dfl
