// Engine: the model, drafters and their K/V, K/V cells and recurrent slots, graphs and their
// arena, threads. It runs passes of many sequences at once; their tokens are a Sequence's.
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

// Form of recurrent layers: our own code (the CPU has some), or ggml's operation for chains
// and its stock operations for trees, or its stock operations alone.
enum class DeltaForm { OWN, FUSED, STOCK };

struct EngineParams {
    int64_t n_ctx = 4096;   // tokens that all sequences can hold together
    int32_t n_parallel = 1; // most sequences
    int64_t n_ubatch = 512; // most rows of one pass
    int n_threads = 0;      // 0: default_threads()
    ggml_type type_k = GGML_TYPE_F16;
    ggml_type type_v = GGML_TYPE_F16;
    std::vector<std::shared_ptr<const Drafter>> drafters;
    int64_t draft_window = 4096;           // target positions that drafters read
    DeltaForm delta_form = DeltaForm::OWN; // the first that works, from this one on
};

// Memory of one use in one place.
struct MemoryUse {
    const char * name;
    std::string place; // name of the device
    uint64_t bytes;
};

// Attention rows of every sequence, of layers that keep the same ones: the target's or a drafter's.
struct CacheGroup {
    KvGroup * rows;
    DraftModel * draft; // the drafter that owns the rows; NULL: the target does
};

// Done and total tokens; true: stop.
using PrefillProgress = std::function<bool(int64_t done, int64_t total)>;

// An accepted path of a pending verify: nodes, root first; NULL: its first n.
struct Path {
    Sequence * sequence;
    const int32_t * nodes;
    int64_t n;
};

// Request for candidates after a sequence's last_token, which is chosen but not appended.
struct DraftRequest {
    Sequence * sequence;
    int32_t last_token;
    int64_t n_draft;
};

// A request to sample from a row of a sequence's last pass or, of a pending verify, along its tree.
struct SampleRequest {
    Sequence * sequence;
    const Sampler * sampler;
    std::vector<int32_t> history; // prompt and answer, as far as penalties look
    int64_t position;             // of the first token sampled
    // Bit t of a row's mask: whether token t may be sampled from it. [rows, mask_words()]; NULL:
    // every token of every row.
    const uint32_t * masks;
    std::vector<int32_t> sampled; // out
};

class Engine {
  public:
    Engine(std::shared_ptr<const Model> model, const EngineParams & params);
    Engine(const Engine &) = delete; // parts point to each other
    Engine & operator=(const Engine &) = delete;

    const Model & model() const { return *model_; }
    int64_t n_ctx() const { return params_.n_ctx; }
    int64_t n_ubatch() const { return params_.n_ubatch; }
    int n_threads() const { return devices_.main().n_threads(); }
    // True if the model has recurrent layers.
    bool is_recurrent() const { return is_recurrent_; }

    // Most rows a verify may be asked to have room for.
    static constexpr int64_t MAX_VERIFY = DFL_MAX_VERIFY;

    // Runs the entries' tokens in one pass; each is of another sequence.
    // Tokens to append join their sequences; afterwards the last one's logits can be read, or all
    // are in all_logits. Nodes to verify are run after the timeline without being appended; all of
    // their rows can be read until the commit, which must follow.
    //
    // An append alone may have any number of tokens, which are run in micro-batches: on an error
    // the timeline ends where the last finished one put it. Arguments are looked at before anything
    // runs.
    void run(const std::vector<BatchEntry> & entries, const PrefillProgress & progress);
    // Samples from rows of the last pass: for each request one token or, of a pending verify, one
    // after another from the root down while they are candidates. Stops before a row that has
    // nothing to sample from; reading that row says why.
    void sample(std::vector<SampleRequest> & requests);
    // Appends paths of pending verifies to their sequences and forgets the rest. An empty path
    // forgets all, and does nothing where no verify is pending.
    void commit(const std::vector<Path> & paths);
    // The k best candidates of one of the drafters for each position, request after request. Moves
    // no cursor. Where scores are not finite the drafter has forgotten that timeline so far.
    Draft draft(int64_t drafter, const std::vector<DraftRequest> & requests, int64_t k);
    int32_t n_parallel() const { return params_.n_parallel; }
    // Most rows of a pass.
    int64_t max_rows() const;
    // Words of a mask of tokens.
    int64_t mask_words() const { return (model_->hparams().n_vocab + 31) / 32; }

    // Has the device select the k best of every row in the passes to come, so that only these are
    // copied; 0 ends it. False if it cannot.
    bool set_top_k(int64_t k);
    // Makes room for verifies of up to n rows.
    void reserve_verify(int64_t n);
    // Most rows of a verify or a draft now.
    int64_t verify_rows() const { return verify_rows_; }

    // Returns memory by use and place, none of 0 bytes.
    std::vector<MemoryUse> memory() const;
    // The kind of graph that decides the size of the arena: "prefill", "verify" or "draft".
    const char * largest_graph() const;
    int64_t n_graphs_built() const { return graphs_.n_built(); }
    int64_t n_graph_nodes() const { return graphs_.largest_n_nodes(); }
    // Forward passes of the target so far.
    int64_t n_passes() const { return n_passes_; }
    uint64_t bytes_read() const { return devices_.bytes_read(); }
    // Names of operations that the device lacks and the CPU does.
    const std::set<std::string> & cpu_operations() const { return graphs_.cpu_operations(); }
    uint64_t submit_ns() const { return devices_.main().submit_ns(); }
    uint64_t wait_ns() const { return devices_.main().wait_ns(); }

    // ---- for sequences

    // Gives a sequence a slot, and takes it back in the end. Throws
    // DFL_STATUS_UNSUPPORTED if others have all, DFL_STATUS_ARGUMENT if there is no memory to run
    // in.
    int32_t register_sequence(Sequence * sequence);
    void unregister_sequence(const Sequence * sequence);

    // Token ids that are no tokens, or more of them than the context holds after some.
    void check_ids(const int32_t * tokens, int64_t n, int64_t after) const;

    // The target's groups, the one first that keeps every row, then the drafters'. Of one: whether
    // prefixes hold pages of it, and how many of the rows before position n a snapshot has at most,
    // and at least.
    const std::vector<CacheGroup> & caches() const { return caches_; }
    bool shares_pages(size_t cache) const;
    int64_t max_snapshot_rows(size_t cache, int64_t n) const;
    int64_t min_snapshot_rows(size_t cache, int64_t n) const;
    // True if a sequence can attach any part of a prefix: no layer is recurrent or has a window.
    bool partial_prefix_ok() const;
    // Moves blocks of prefixes from cells to the host, those that no sequence uses and that no
    // prefix keeps there, until n_cells are free or none is left. False if that took more than
    // n_bytes.
    bool offload(int64_t n_cells, uint64_t n_bytes);
    // Bytes of all prefixes on the host.
    uint64_t & prefix_bytes() { return prefix_bytes_; }
    // Has drafters take in the pending features of a sequence; rows are gone then.
    void catch_up(int32_t slot);

    Backend & main() { return devices_.main(); }
    KvCache & kv() { return kv_; }
    RecurrentCache & recurrent() { return recurrent_; }
    const std::vector<std::unique_ptr<DraftModel>> & drafts() const { return drafts_; }

  private:
    LayerPlace layer_place();
    void attach_drafters();
    std::vector<int64_t> max_cells() const;
    // Returns the most rows of a pass, padding included, where verifies have up to so many.
    int64_t max_masked_rows(int64_t n_verify) const;
    void reserve_graphs();
    void reserve_verify_graphs(int64_t n);
    bool can_select_top(int64_t k) const;
    // Makes a target's pass select the k best of its rows.
    void select_top(BatchShape & shape, int64_t k) const;
    void build_forward(CachedGraph & cached);
    // Throws if two of these are of one sequence, or one is of a sequence of another engine.
    template <typename Of>
    void check_sequences(const char * what, const std::vector<Of> & those) const;
    void check(const std::vector<BatchEntry> & entries) const;
    void check_verifies(const std::vector<BatchEntry> & entries) const;
    void append_in_microbatches(const BatchEntry & entry, const PrefillProgress & progress);
    // Runs n_rows tokens of each entry; from: the first of them.
    void run_pass(const std::vector<BatchEntry> & entries, const std::vector<int64_t> & from,
                  const std::vector<int64_t> & n_rows);
    Pass plan(const std::vector<BatchEntry> & entries, const std::vector<int64_t> & from,
              const std::vector<int64_t> & n_rows) const;
    int64_t n_padded(const Pass & pass) const;
    int64_t max_appended() const;
    // Largest total rows of the lanes that prompt chunks share, for which memory is reserved.
    int64_t max_chunk_lane_rows() const { return 2 * max_appended(); }
    std::vector<int64_t> chunks_of(const Pass & pass) const;
    void take_cells(Pass & pass);
    void take_feature_rows(Pass & pass);
    // Returns n rows of the ring whose features no drafter waits for and no pending verify has.
    std::vector<int64_t> free_ring_rows(size_t n) const;
    int64_t n_ring_rows(int64_t n_verify) const;
    void take_update_rows(Pass & pass) const;
    void release(Pass & pass);
    void plan_recurrent_rows(Pass & pass);
    void update_attended_cells();
    BatchShape shape_of(const Pass & pass) const;
    CachedGraph & compute(Pass & pass);
    // Records which rows of a completed pass left finite keys, values and states: those whose
    // residual stream enters the last layer finite, as NaN and infinities propagate. A row's
    // logits, if any, must be finite too; its first logit stands for all.
    static void find_finite_rows(const CachedGraph & cached, Pass & pass);
    void set_inputs(CachedGraph & cached, const Pass & pass);
    void forget_rows();
    // Moves recurrent states along accepted paths. On an error some layers' may have moved.
    void promote_paths(const std::vector<Path> & paths);
    // Most accepted nodes that recurrent states move along in one graph: their updates are gathered
    // first, at 3.5 MiB a node of a 27B.
    static constexpr int64_t MAX_STEPS = 16;
    // The graph of our own code that moves recurrent states.
    CachedGraph & scan_promote_graph();
    // ggml's, of so many lanes, along so many accepted nodes each.
    CachedGraph & promote_graph(int64_t n_steps, int64_t n_lanes, bool in_place);
    // Along the nodes [first, first + MAX_STEPS) of accepted paths, those before them being done.
    void promote_steps(const std::vector<AcceptedPath> & paths, int64_t first);
    // Rows of the convolution updates that become the last inputs after n nodes of a path.
    std::vector<int32_t> last_inputs(const PassEntry & pending, const std::vector<int32_t> & path,
                                     int64_t n) const;

    std::shared_ptr<const Model> model_;
    EngineParams params_;
    Devices devices_;
    bool is_recurrent_;
    KvCache kv_;
    RecurrentCache recurrent_;
    bool scans_; // our own code runs recurrent layers
    bool fused_; // a chain of them is one operation
    GraphSizes sizes_;
    GraphPool graphs_;
    std::unique_ptr<FeatureRing> ring_;               // NULL without a drafter
    std::vector<std::unique_ptr<DraftModel>> drafts_; // one for each drafter
    std::vector<CacheGroup> caches_;                  // see caches()
    std::vector<Sequence *> sequences_;               // slot by slot; NULL: free
    std::vector<int64_t> n_kv_; // cells that the next pass attends, of each group
    std::vector<RecentMax> recent_cells_;
    RecentMax recent_trees_;
    int64_t n_top_ = 0; // set by set_top_k()
    int64_t verify_rows_ = 0;
    int64_t n_passes_ = 0;
    uint64_t prefix_bytes_ = 0;
};

} // namespace dfl
