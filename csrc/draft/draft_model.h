// A drafter in an engine: its K/V cache, and the features that are not in the cache yet.
#pragma once

#include "cache/kv_cache.h"
#include "cache/recurrent_cache.h"
#include "draft/draft_output.h"
#include "draft/drafter.h"
#include "draft/feature_ring.h"
#include "graph/graph.h"
#include "graph/graph_sizes.h"
#include "sampling/sampler.h"

#include <algorithm>
#include <map>
#include <memory>
#include <vector>

namespace dfl {

// Sizes of a drafter in an engine; EngineParams has n_ctx, n_ubatch and n_parallel.
struct DraftSizes {
    ggml_type cache_type;
    int64_t window; // number of last positions that the drafter attends to; n_ctx: all
    int64_t n_ctx;
    int64_t n_ubatch;
    int64_t n_verify; // largest number of rows of one verify or draft of all sequences
    int64_t n_parallel;
};

// Parts of an engine that a drafter uses.
struct DraftHost {
    const Model & target;
    Devices & devices;
    GraphPool & graphs;
    const FeatureRing & ring;
    size_t index;
    DraftSizes sizes;
};

// A request for n_draft tokens after `position` committed tokens and last_token. sampler: a draft
// whose steps depend on the path follows the tokens that it would sample; NULL: the best.
struct DraftBlock {
    int32_t sequence, last_token, position;
    int64_t n_draft;
    const Sampler * sampler = nullptr;
};

// The row of the feature ring that has the features of a committed token.
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

    // Builds the largest graphs, so that memory cannot run out during a draft.
    virtual void reserve() = 0;
    // Computes the K/V of all pending features.
    virtual void catch_up() = 0;
    // Drafts the k best candidates for each position of blocks of different sequences.
    virtual Draft draft(const std::vector<DraftBlock> & blocks, int64_t k) = 0;

    const Drafter & drafter() const { return *drafter_; }
    size_t index() const { return host_.index; }
    int64_t window() const { return host_.sizes.window; }
    int64_t prompt_window() const { return std::min(window(), drafter_->draft().prompt_window); }
    KvCache & kv() { return kv_; }
    const KvCache & kv() const { return kv_; }
    // Sets the scale of the token embeddings of later drafts.
    void set_embedding_scale(float scale) { embedding_scale_ = scale; }
    // Makes room for drafts of n_rows rows. Invalidates all graphs of the drafter.
    void reserve_rows(int64_t n_rows);

    void add_pending(const std::vector<Feature> & features);
    const std::vector<Feature> & pending() const { return pending_; }
    int64_t n_pending(int32_t sequence) const;

    // Drops the K/V and pending features of a sequence from a position on.
    virtual void truncate(int32_t sequence, int32_t position);
    // Drops all K/V and pending features of a sequence and zeroes its cells, which may hold NaN.
    void clear(int32_t sequence);
    // Frees cells for n_rows more rows of each sequence: drops the oldest rows of the longest
    // sequence. Sequences that share pages of the target can need more cells than the drafter has.
    void make_room(const std::map<int32_t, int64_t> & n_rows);

  protected:
    // Writes the scaled embeddings of tokens to dst, [n_embd, n].
    void embed(const std::vector<int32_t> & tokens, float * dst) const {
        drafter_->embed(host_.target, embedding_scale_, tokens.data(),
                        static_cast<int64_t>(tokens.size()), dst);
    }
    GraphContext graph_context(CachedGraph & cached) const;
    void select_top(BatchShape & shape, int64_t k) const;
    // Drops rows that a draft after `position` committed tokens does not attend to.
    void slide_window(int32_t sequence, int32_t position);
    // Take a cell for each feature, or for each row of the blocks. If they throw, no cell is taken.
    std::vector<int64_t> take_cells(const std::vector<Feature> & features);
    std::vector<int64_t> take_cells(const std::vector<DraftBlock> & blocks);
    void release(const std::vector<int64_t> & cells);
    template <typename Is>
    void drop_pending(Is && is) {
        pending_.erase(std::remove_if(pending_.begin(), pending_.end(), is), pending_.end());
    }

    std::shared_ptr<const Drafter> drafter_;
    DraftHost host_;
    Backend & backend_;
    GraphSizes sizes_;
    KvCache kv_;
    float embedding_scale_;
    std::vector<Feature> pending_; // features not in the K/V yet, by position in each sequence

  private:
    RecurrentCache no_recurrent_;
};

} // namespace dfl
