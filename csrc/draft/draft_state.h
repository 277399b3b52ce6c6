// What drafting remembers in an engine: the drafter's K/V ring, and the target's features that are
// not in it yet. All of it lives on the device.
#pragma once

#include "cache/cache.h"
#include "draft/draft_output.h"
#include "draft/drafter.h"
#include "graph/graph.h"
#include "graph/graph_sizes.h"

#include <memory>
#include <vector>

namespace dfl {

class DraftState {
  public:
    // Feature rows that may wait for injection before a verify brings more.
    static constexpr int64_t MAX_PENDING = 64;

    // window: target positions the drafter sees. n_ubatch: most rows of one prefill pass. n_verify:
    // most rows of one verify; max_block: most rows of one draft.
    DraftState(std::shared_ptr<const Drafter> drafter, const Model & target, Devices & devices,
               ggml_type cache_type, int64_t window, int64_t n_ubatch, int64_t n_verify,
               int64_t max_block);

    const Drafter & drafter() const { return *drafter_; }
    int64_t max_block() const { return max_block_; }
    // Makes room for the features of larger verifies, after which every graph that was built with
    // the old ones is void. Throws DFL_STATUS_MEMORY and changes nothing.
    void grow(int64_t n_verify, GraphPool & graphs);
    int64_t window() const { return window_; }
    int64_t n_pending() const { return (int64_t)pending_.size(); }
    // Of the cache and the features; and of the masks.
    uint64_t bytes() const { return kv_.bytes() + memory_.bytes; }
    uint64_t mask_bytes() const { return kv_.masks().bytes(); }

    uint64_t mask_bytes_written() const { return kv_.masks().bytes_written(); }

    // Makes b write the taps of its rows into the feature rows given by live.draft.feature_rows.
    void add_taps(LiveGraph & live, Build & b);
    // Adds to a prefill graph the injection of its own rows (those of the prefill region).
    void add_prefill_injection(LiveGraph & live);

    // Feature rows for the next pass: of the ring, or the prefill region.
    std::vector<int64_t> ring_rows(int64_t n) const;
    std::vector<int64_t> prefill_rows(int64_t n) const;
    bool ring_has_room(int64_t n) const { return n_pending() + n <= ring_; }
    // Where a padding row's features go: nobody reads them.
    int64_t junk_row() const { return ring_; }
    // These rows belong to the timeline now, from a position on, and wait for injection.
    void keep(const std::vector<int64_t> & rows, int32_t position);
    // Takes cells for a prefill's rows, which begin at position, and fills the graph's inputs.
    void set_prefill_injection(LiveGraph & live, int32_t position);

    // Builds the largest draft, so that memory runs out before anything is drafted.
    void reserve(GraphPool & graphs);
    // Projects all pending features now.
    void flush(GraphPool & graphs);
    // Runs the block after `position` committed tokens and picks the k best of its n_draft rows.
    Draft run_block(GraphPool & graphs, int32_t last_token, int32_t position, int64_t n_draft,
                    int64_t k, bool log_sum_exp);

    // Forgets everything from a position on.
    void truncate(int32_t position);
    // Zeroes what is known from a position on.
    void clear_from(int32_t position) { kv_.clear_from(SEQUENCE, position); }
    // Forgets everything and zeroes what held something, so that no value that is not finite stays
    // behind.
    void clear();

  private:
    struct Pending {
        int64_t row;
        int32_t position;
    };

    void allocate_features(int64_t n_verify);
    Build make_build(LiveGraph & live) const;
    void make_injection_inputs(LiveGraph & live) const;
    void build_draft(LiveGraph & live) const;
    void set_block(LiveGraph & live, int32_t last_token, int32_t position,
                   const std::vector<int64_t> & cells);
    // Pending features as inputs of a graph that injects.
    void set_injection(LiveGraph & live, const std::vector<int64_t> & cells);
    // Forgets what a draft after `position` committed tokens does not see.
    void forget_unseen(int32_t position);
    std::vector<int64_t> own_cells(const std::vector<Pending> & features);
    void release(const std::vector<int64_t> & cells);
    void write_positions(const LiveGraph & live, ggml_tensor * tensor,
                         const std::vector<int32_t> & positions) const;

    std::shared_ptr<const Drafter> drafter_;
    const Model & target_;
    Backend & backend_; // of the drafter
    GraphSizes sizes_;
    int64_t window_;
    KvCache kv_;
    RecurrentCache no_recurrent_;
    ggml_context_ptr ctx_;
    Allocation memory_;
    int64_t n_ubatch_;
    int64_t max_block_;
    int64_t ring_ = 0;                 // feature rows that verifies and single tokens share
    ggml_tensor * features_ = nullptr; // [n_features, ring + n_ubatch]
    std::vector<Pending> pending_;
    int64_t junk_cell_;
};

} // namespace dfl
