// Engine: the model, its drafters, K/V cells, recurrent slots, cached graphs with their arena, and
// threads. Runs passes over many sequences at once; a Sequence holds the tokens of one.
#pragma once

#include "arch/model.h"
#include "cache/kv_cache.h"
#include "cache/recurrent_cache.h"
#include "draft/draft_model.h"
#include "engine/pass.h"
#include "graph/graph.h"
#include "graph/graph_sizes.h"
#include "sampling/sampler.h"

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace dfl {

class Prefix;
class Sequence;

// Implementation of recurrent layers: our own CPU code; ggml's fused operation for chains and its
// basic operations for trees; or basic operations only.
enum class DeltaForm { OWN, FUSED, STOCK };

// Options of an engine; dfl_engine_params describes the fields without a comment.
struct EngineParams {
    int64_t n_ctx = 4096;
    int32_t n_parallel = 1;
    int64_t n_ubatch = 512;
    int n_threads = 0;
    ggml_type type_k = GGML_TYPE_F16;
    ggml_type type_v = GGML_TYPE_F16;
    std::vector<std::shared_ptr<const Drafter>> drafters;
    int64_t draft_window = 4096;
    std::vector<int64_t> taps;
    // Form of recurrent layers to try first; the forms after it in DeltaForm are fallbacks.
    DeltaForm delta_form = DeltaForm::OWN;
};

// Bytes of memory for one purpose on one device, see dfl_memory.
struct MemoryUse {
    const char * name;
    std::string place;
    uint64_t bytes;
};

// A K/V group of the target or of a drafter, with the rows of all sequences.
struct CacheGroup {
    KvGroup * rows;
    DraftModel * draft; // the drafter that owns the group; NULL: the target owns the group
};

// Receives done and total tokens of a prefill; returns true to stop the prefill.
using PrefillProgress = std::function<bool(int64_t done, int64_t total)>;

// The accepted path of a pending verify: indices of n nodes, root first; NULL: the first n nodes.
struct Path {
    Sequence * sequence;
    const int32_t * nodes;
    int64_t n;
};

// A request for candidates for the n_draft positions after last_token, which is not appended yet.
// sampler: see DraftBlock.
struct DraftRequest {
    Sequence * sequence;
    int32_t last_token;
    int64_t n_draft;
    const Sampler * sampler = nullptr;
};

// A request to sample from a sequence's rows; dfl_sample_request describes the fields.
struct SampleRequest {
    Sequence * sequence;
    const Sampler * sampler;
    std::vector<int32_t> history;
    int64_t position;
    const uint32_t * masks;
    std::vector<int32_t> sampled;
};

class Engine {
  public:
    Engine(std::shared_ptr<const Model> model, const EngineParams & params);
    Engine(const Engine &) = delete;
    Engine & operator=(const Engine &) = delete;

    const Model & model() const { return *model_; }
    int64_t n_ctx() const { return params_.n_ctx; }
    int64_t n_ubatch() const { return params_.n_ubatch; }
    int n_threads() const { return devices_.main().n_threads(); }
    bool is_recurrent() const { return is_recurrent_; }

    static constexpr int64_t MAX_VERIFY = DFL_MAX_VERIFY;

    // Runs batch entries of different sequences, as dfl_engine_run() describes.
    void run(const std::vector<BatchEntry> & entries, const PrefillProgress & progress);
    // Samples one token for each request; in a pending verify, tokens along a path of its tree.
    void sample(std::vector<SampleRequest> & requests);
    // Appends the accepted paths of pending verifies and discards all other nodes.
    void commit(const std::vector<Path> & paths);
    // Drafts the k best candidates for each position of each request, as dfl_engine_draft() does.
    Draft draft(int64_t drafter, const std::vector<DraftRequest> & requests, int64_t k);
    int32_t n_parallel() const { return params_.n_parallel; }
    // Returns the largest number of rows of a pass that only appends rows or only verifies rows.
    int64_t max_rows() const;
    int64_t mask_words() const { return (model_->hparams().n_vocab + 31) / 32; }

    // Makes the device select each row's k best tokens; 0: off. False if the device cannot select.
    bool set_top_k(int64_t k);
    void reserve_verify(int64_t n);
    int64_t verify_rows() const { return verify_rows_; }

    std::vector<MemoryUse> memory() const;
    const char * largest_graph() const;
    int64_t n_graphs_built() const { return graphs_.n_built(); }
    int64_t n_graph_nodes() const { return graphs_.largest_n_nodes(); }
    int64_t n_passes() const { return n_passes_; }
    uint64_t bytes_read() const { return devices_.bytes_read(); }
    const std::set<std::string> & cpu_operations() const { return graphs_.cpu_operations(); }
    uint64_t submit_ns() const { return devices_.main().submit_ns(); }
    uint64_t wait_ns() const { return devices_.main().wait_ns(); }

    // ---- methods used by Sequence and Prefix

    // Assigns a free slot to a sequence. Throws DFL_STATUS_UNSUPPORTED if no slot is free, and
    // DFL_STATUS_ARGUMENT in a dry run.
    int32_t register_sequence(Sequence * sequence);
    void unregister_sequence(const Sequence * sequence);

    // Throws DFL_STATUS_ARGUMENT for unknown tokens or if `after` + n tokens exceed the context.
    void check_ids(const int32_t * tokens, int64_t n, int64_t after) const;

    // Returns all K/V groups: the target's, of which the first keeps all positions, then drafters'.
    const std::vector<CacheGroup> & caches() const { return caches_; }
    // True if prefixes hold pages of a K/V group instead of copies of its rows.
    bool shares_pages(size_t cache) const;
    // Returns the largest number of rows that a snapshot of n tokens has in a K/V group.
    int64_t max_snapshot_rows(size_t cache, int64_t n) const;
    int64_t min_snapshot_rows(size_t cache, int64_t n) const;
    // True if a sequence can start with a part of a prefix: no layer is recurrent or has a window.
    bool partial_prefix_ok() const;
    // Moves blocks that no sequence uses and no prefix keeps in cells to the host, until n_cells
    // more cells are free or no block is left. False if n_bytes of host memory are too few for
    // that.
    bool offload(int64_t n_cells, uint64_t n_bytes);
    // Returns the counter of host bytes of all prefixes, which their blocks and states update.
    uint64_t & prefix_bytes() { return prefix_bytes_; }
    // Computes drafter K/V of a sequence's pending features. No logits are readable afterwards.
    void catch_up(int32_t slot);

    Backend & main() { return devices_.main(); }
    KvCache & kv() { return kv_; }
    RecurrentCache & recurrent() { return recurrent_; }
    const std::vector<std::unique_ptr<DraftModel>> & drafts() const { return drafts_; }
    // Returns a drafter. Throws DFL_STATUS_ARGUMENT if index is out of range.
    DraftModel & drafter_at(int64_t index);

  private:
    LayerPlace layer_place();
    void attach_drafters();
    void allocate_ring();
    std::vector<int64_t> max_cells() const;
    // Returns the largest number of rows of a pass, padding included, with n_verify verified rows.
    int64_t max_masked_rows(int64_t n_verify) const;
    void reserve_graphs();
    void reserve_verify_graphs(int64_t n);
    bool can_select_top(int64_t k) const;
    void select_top(BatchShape & shape, int64_t k) const;
    void build_forward(CachedGraph & cached);
    // Throws DFL_STATUS_ARGUMENT if two requests share a sequence, or one is of another engine.
    template <typename Of>
    void check_sequences(const char * what, const std::vector<Of> & those) const;
    void check(const std::vector<BatchEntry> & entries) const;
    void check_verifies(const std::vector<BatchEntry> & entries) const;
    void append_in_microbatches(const BatchEntry & entry, const PrefillProgress & progress);
    // Runs a pass of n_rows[i] tokens of each batch entry i, from its token from[i] on.
    void run_pass(const std::vector<BatchEntry> & entries, const std::vector<int64_t> & from,
                  const std::vector<int64_t> & n_rows);
    Pass plan(const std::vector<BatchEntry> & entries, const std::vector<int64_t> & from,
              const std::vector<int64_t> & n_rows) const;
    int64_t n_padded(const Pass & pass) const;
    int64_t max_appended() const;
    // Returns the most rows, padding included, of a recurrent batch of prompt chunks.
    int64_t max_chunk_lane_rows() const { return 2 * max_appended(); }
    std::vector<int64_t> chunks_of(const Pass & pass) const;
    void take_cells(Pass & pass);
    void take_feature_rows(Pass & pass);
    // Returns up to n rows of the feature ring that no drafter and no pending verify needs.
    std::vector<int64_t> free_ring_rows(size_t n) const;
    int64_t n_ring_rows(int64_t n_verify) const;
    void take_update_rows(Pass & pass) const;
    void release(Pass & pass);
    void plan_recurrent_rows(Pass & pass);
    void update_attended_cells();
    BatchShape shape_of(const Pass & pass) const;
    CachedGraph & compute(Pass & pass);
    // Marks the rows of a pass without NaN and infinities. These propagate, so two numbers of a row
    // are enough to test: the sum of the last layer's input, and the first logit.
    static void find_finite_rows(const CachedGraph & cached, Pass & pass);
    void set_inputs(CachedGraph & cached, const Pass & pass);
    void forget_rows();
    // Advances recurrent states along accepted paths. After an error some layers may have advanced.
    void promote_paths(const std::vector<Path> & paths);
    // Largest number of accepted nodes of a sequence in one promotion graph, which gathers their
    // node updates (3.5 MiB a node of a 27B model).
    static constexpr int64_t MAX_STEPS = 16;
    CachedGraph & scan_promote_graph();
    // Returns the graph in which ggml's operations promote n_lanes sequences by n_steps nodes each.
    CachedGraph & promote_graph(int64_t n_steps, int64_t n_lanes, bool in_place);
    // Advances recurrent states along at most MAX_STEPS nodes of each path, from node `first` on.
    void promote_steps(const std::vector<AcceptedPath> & paths, int64_t first);
    // Returns rows of conv_updates: the last d_conv - 1 convolution inputs after n nodes of `path`.
    std::vector<int32_t> last_inputs(const PassEntry & pending, const std::vector<int32_t> & path,
                                     int64_t n) const;

    std::shared_ptr<const Model> model_;
    EngineParams params_;
    Devices devices_;
    bool is_recurrent_;
    KvCache kv_;
    RecurrentCache recurrent_;
    bool scans_; // true: recurrent layers run in our own CPU code
    bool fused_; // true: recurrent layers need the tree form only for trees, not for chains
    GraphSizes sizes_;
    GraphPool graphs_;
    std::unique_ptr<FeatureRing> ring_; // feature ring; NULL without drafters and taps
    std::vector<std::unique_ptr<DraftModel>> drafts_;
    std::vector<CacheGroup> caches_;
    std::vector<Sequence *> sequences_; // sequence of each slot; NULL: the slot is free
    std::vector<int64_t> n_kv_;         // number of cells of each K/V group that a pass attends to
    std::vector<RecentMax> recent_cells_;
    RecentMax recent_trees_;
    int64_t n_top_ = 0;
    int64_t verify_rows_ = 0;
    int64_t n_passes_ = 0;
    uint64_t prefix_bytes_ = 0;
};

} // namespace dfl
