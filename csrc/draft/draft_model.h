// A drafter in an engine: its K/V of every sequence, and the features that are not in it yet.
#pragma once

#include "cache/kv_cache.h"
#include "cache/recurrent_cache.h"
#include "draft/draft_output.h"
#include "draft/drafter.h"
#include "draft/feature_ring.h"
#include "graph/graph.h"
#include "graph/graph_sizes.h"

#include <algorithm>
#include <map>
#include <memory>
#include <vector>

namespace dfl {

struct DraftSizes {
    ggml_type cache_type;
    int64_t window;     // target positions that the drafter sees; n_ctx: all
    int64_t n_ctx;      // tokens of all sequences together
    int64_t n_ubatch;   // most rows of one prefill pass
    int64_t n_verify;   // most rows of one verify, and of one draft of many sequences
    int64_t n_parallel; // most sequences
};

// Parts of an engine that a drafter uses.
struct DraftHost {
    const Model & target;
    Devices & devices;
    GraphPool & graphs;
    const FeatureRing & ring;
    size_t index; // number of the drafter in the engine
    DraftSizes sizes;
};

// Request for n_draft tokens of a sequence after `position` committed tokens and last_token.
struct DraftBlock {
    int32_t sequence, last_token, position;
    int64_t n_draft;
};

// The row of the ring with the features of a committed token.
struct Feature {
    int32_t sequence;
    int64_t row;
    int32_t position, token;
};

class DraftModel {
  public:
    DraftModel(std::shared_ptr<const Drafter> drafter, const DraftHost & host);
    virtual ~DraftModel() = default;
    DraftModel(const DraftModel &) = delete;
    DraftModel & operator=(const DraftModel &) = delete;

    // Builds the largest graphs, so that memory runs out before anything is drafted.
    virtual void reserve() = 0;
    // Takes all pending features into the K/V.
    virtual void catch_up() = 0;
    // Drafts after the last tokens, `blocks` being of different sequences: their positions, block
    // by block.
    virtual Draft draft(const std::vector<DraftBlock> & blocks, int64_t k) = 0;

    const Drafter & drafter() const { return *drafter_; }
    size_t index() const { return host_.index; }
    // Positions before a draft that it sees.
    int64_t window() const { return host_.sizes.window; }
    KvCache & kv() { return kv_; }
    const KvCache & kv() const { return kv_; }
    // Makes room for drafts of more rows, after which graphs built before are void.
    void reserve_rows(int64_t n_rows);

    // Keeps features of tokens that joined a sequence until they are in the K/V.
    void add_pending(const std::vector<Feature> & features);
    const std::vector<Feature> & pending() const { return pending_; }
    int64_t n_pending(int32_t sequence) const;

    // Forgets everything of a sequence from a position on.
    virtual void truncate(int32_t sequence, int32_t position);
    // Forgets everything of it and zeroes what held something, so that no value that is not finite
    // stays behind.
    void clear(int32_t sequence);
    // Makes room for rows of sequences. On a CPU these share pages of the target's cache, and may
    // have more tokens together than there are cells here: who holds the most gives up its oldest.
    void make_room(const std::map<int32_t, int64_t> & n_rows);

  protected:
    GraphContext graph_context(CachedGraph & cached) const;
    // Has a graph select the k best tokens of each row on the device, where that can.
    void select_top(BatchShape & shape, int64_t k) const;
    // Forgets rows that a draft after `position` committed tokens does not attend to.
    void slide_window(int32_t sequence, int32_t position);
    // Takes cells for features, or for the rows of blocks; both throw and leave no cell taken.
    std::vector<int64_t> take_cells(const std::vector<Feature> & features);
    std::vector<int64_t> take_cells(const std::vector<DraftBlock> & blocks);
    void release(const std::vector<int64_t> & cells);
    template <typename Is>
    void drop_pending(Is && is) {
        pending_.erase(std::remove_if(pending_.begin(), pending_.end(), is), pending_.end());
    }

    std::shared_ptr<const Drafter> drafter_;
    DraftHost host_;
    Backend & backend_; // device of the drafter
    GraphSizes sizes_;
    KvCache kv_;
    std::vector<Feature> pending_; // those of a sequence in the order of positions

  private:
    RecurrentCache no_recurrent_;
};

} // namespace dfl
