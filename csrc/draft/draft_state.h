// What drafting remembers in an engine: the drafter's K/V of every sequence, and the target's
// features that are not in it yet. All of it lives on the device.
#pragma once

#include "cache/kv_cache.h"
#include "cache/recurrent_cache.h"
#include "draft/draft_output.h"
#include "draft/drafter.h"
#include "graph/graph.h"
#include "graph/graph_sizes.h"

#include <algorithm>
#include <map>
#include <memory>
#include <vector>

namespace dfl {

struct DraftSizes {
    ggml_type cache_type;
    int64_t window;     // target positions that the drafter sees
    int64_t n_ctx;      // of all sequences together
    int64_t n_ubatch;   // most rows of one prefill pass
    int64_t n_verify;   // of one pass that are verified
    int64_t max_block;  // of one sequence's draft
    int64_t n_parallel; // most sequences
};

// What is drafted of a sequence after `position` committed tokens.
struct DraftBlock {
    int32_t sequence, last_token, position;
    int64_t n_draft;
};

// Rows of a prefill, from a position on.
struct InjectedRows {
    int32_t sequence, position;
    int64_t n;
};

class DraftState {
  public:
    // Feature rows that may wait for injection before a verify brings more.
    static constexpr int64_t MAX_PENDING = 64;

    DraftState(std::shared_ptr<const Drafter> drafter, const Model & target, Devices & devices,
               const DraftSizes & sizes);

    const Drafter & drafter() const { return *drafter_; }
    int64_t max_block() const { return draft_sizes_.max_block; }
    // Of a draft of many sequences.
    int64_t max_rows() const { return std::max(draft_sizes_.max_block, draft_sizes_.n_verify); }
    // Makes room for the features of larger verifies, after which every graph that was built with
    // the old ones is void. Throws DFL_STATUS_MEMORY and changes nothing.
    void reserve_verify(int64_t n_verify, GraphPool & graphs);
    int64_t window() const { return draft_sizes_.window; }
    // Its K/V, which prefixes keep rows of once what is pending is in it.
    KvGroup & cache() { return kv_.groups().front(); }
    int64_t n_pending(int32_t sequence) const {
        return std::count_if(pending_.begin(), pending_.end(),
                             [&](const Pending & one) { return one.sequence == sequence; });
    }
    // Of the cache and the features; and of the masks.
    uint64_t bytes() const { return kv_.bytes() + memory_.bytes; }
    uint64_t mask_bytes() const { return kv_.mask_bytes(); }

    uint64_t mask_bytes_written() const { return kv_.mask_bytes_written(); }

    // Makes g write the taps of its rows into the feature rows given by cached.draft.feature_rows.
    void add_taps(CachedGraph & cached, GraphContext & g);
    // Adds to a prefill graph the injection of its own rows (those of the prefill region).
    void add_prefill_injection(CachedGraph & cached);

    // Rows for features of a pass: of the ring, those whose features wait for injection; of its
    // prompts; and of padding.
    std::vector<bool> pending_rows() const;
    int64_t first_prefill_row() const { return ring_; }
    int64_t padding_row() const { return features_->ne[1] - 1; }
    // These rows of the ring belong to a timeline now, from a position on, and wait for injection.
    void add_pending(int32_t sequence, const std::vector<int64_t> & rows, int32_t position);
    // Takes cells for a prefill's rows, and fills the graph's inputs.
    void set_prefill_injection(CachedGraph & cached, const std::vector<InjectedRows> & injected);

    // Builds the largest draft, so that memory runs out before anything is drafted.
    void reserve(GraphPool & graphs);
    // Projects all pending features now.
    void flush(GraphPool & graphs);
    // Runs the blocks in one pass and picks the k best of each of their rows.
    std::vector<Draft> run_blocks(GraphPool & graphs, const std::vector<DraftBlock> & blocks,
                                  int64_t k, bool log_sum_exp);

    // Forgets everything of a sequence from a position on.
    void truncate(int32_t sequence, int32_t position);
    // Makes room for rows of sequences. On a CPU these share pages of the target's cache, and may
    // have more tokens together than there are cells here: who holds the most gives up its oldest.
    void make_room(const std::map<int32_t, int64_t> & n_rows);
    // Forgets everything of it and zeroes what held something, so that no value that is not finite
    // stays behind.
    void clear(int32_t sequence);

  private:
    struct Pending {
        int32_t sequence;
        int64_t row;
        int32_t position;
    };

    void allocate_features(int64_t n_verify);
    GraphContext make_build(CachedGraph & cached) const;
    void make_injection_inputs(CachedGraph & cached) const;
    void build_draft(CachedGraph & cached) const;
    void set_block_inputs(CachedGraph & cached, const std::vector<DraftBlock> & blocks,
                          const std::vector<int64_t> & cells);
    // Features as inputs of a graph that injects.
    void set_injection(CachedGraph & cached, const std::vector<Pending> & features,
                       const std::vector<int64_t> & cells);
    // Forgets rows that a draft after `position` committed tokens does not attend to.
    void slide_window(int32_t sequence, int32_t position);
    // Those of the blocks' sequences.
    std::vector<Pending> pending_of(const std::vector<DraftBlock> & blocks) const;
    // They are in the cache, or forgotten.
    template <typename Is>
    void drop_pending(Is && is);
    std::vector<int64_t> take_cells(const std::vector<Pending> & features);
    void release(const std::vector<int64_t> & cells);

    std::shared_ptr<const Drafter> drafter_;
    const Model & target_;
    Backend & backend_; // of the drafter
    GraphSizes sizes_;
    DraftSizes draft_sizes_;
    KvCache kv_;
    RecurrentCache no_recurrent_;
    ggml_context_ptr ctx_;
    Allocation memory_;
    int64_t ring_ = 0;                 // feature rows that verifies and single tokens share
    ggml_tensor * features_ = nullptr; // [n_features, ring + rows of a prefill pass]
    std::vector<Pending> pending_;     // of each sequence in the order of positions
    int64_t padding_cell_;
    RecentMax recent_cells_;
};

} // namespace dfl
