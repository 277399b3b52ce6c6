// One mutable decode timeline: caches, cursor, and the logits of the last pass.
#pragma once

#include "arch/model.h"
#include "cache/cache.h"
#include "cache/tree.h"
#include "draft/draft_state.h"
#include "graph/graph.h"
#include "graph/graph_sizes.h"

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace dfl {

// In the cell table: the rows of a verify that waits for its commit.
constexpr int32_t OPEN_VERIFY = 1;

// How recurrent layers run: in our own code (the CPU has some), or by ggml's operation for chains
// and its stock operations for trees, or by its stock operations alone.
enum class DeltaForm { OWN, FUSED, STOCK };

struct SessionParams {
    int64_t n_ctx = 4096;   // tokens the timeline can hold
    int64_t n_ubatch = 512; // most rows of one pass
    int n_threads = 0;      // 0: default_threads()
    ggml_type type_k = GGML_TYPE_F16;
    ggml_type type_v = GGML_TYPE_F16;
    std::shared_ptr<const Drafter> drafter; // may be empty
    int64_t draft_window = 4096;            // target positions the drafter sees
    DeltaForm delta_form = DeltaForm::OWN;  // the first that works, from this one on
};

// Everything a prefix leaves behind, kept and dropped together. Attention rows stay where they are
// in the session's cells; what a recurrent layer overwrites is copied here.
struct Checkpoint {
    uint64_t caches; // whose cells these are
    std::vector<int32_t> tokens;
    std::vector<uint8_t> recurrent;
};

// What recurrent layers knew at a position of the timeline that a session can go back to.
struct KeptState {
    int64_t position;
    std::vector<uint8_t> recurrent;
};

// Done and total tokens; true: stop.
using PrefillProgress = std::function<bool(int64_t done, int64_t total)>;

class Session {
  public:
    Session(std::shared_ptr<const Model> model, const SessionParams & params);
    Session(const Session &) = delete; // its parts point to each other
    Session & operator=(const Session &) = delete;

    const Model & model() const { return *model_; }
    int64_t n_ctx() const { return params_.n_ctx; }
    int64_t position() const { return static_cast<int64_t>(tokens_.size()); }
    int n_threads() const { return devices_.main().n_threads(); }

    // States of recurrent layers kept at a time.
    static constexpr size_t MAX_KEPT = 2;

    // Takes the timeline back to where it agrees with n tokens, less the last of them, whose logits
    // begin an answer; returns how many are there. Closes an open verify. With recurrent layers it
    // goes back to a state that it kept, if not as far as position 0: the prefill that comes to the
    // last token keeps the state before it, the newest MAX_KEPT of them stay while their tokens do.
    int64_t sync(const int32_t * tokens, int64_t n);

    // Appends tokens in micro-batches; afterwards the last one's logits can be read. all_logits, if
    // not NULL, takes every token's: [n_vocab, n]. On an error the timeline ends where the last
    // finished micro-batch put it.
    // With recurrent layers the last token that sync() was given is a pass of its own, if not all
    // logits are asked for: it has the same bits whether or not those before it were there.
    void prefill(const int32_t * tokens, int64_t n, float * all_logits,
                 const PrefillProgress & progress);

    // Most tokens of a row that keep_top() may be asked for.
    static constexpr int64_t MAX_TOP = DFL_MAX_TOP;

    // Most rows a verify may be asked to have room for.
    static constexpr int64_t MAX_VERIFY = DFL_MAX_VERIFY;

    // Rows of the last pass whose logits can be read: 1 after prefill, n after verify.
    int64_t n_out_rows() const { return last_ != nullptr ? n_out_rows_ : 0; }
    // Token with the largest logit of a row, lowest id on ties (host devices). Like the two below
    // throws DFL_STATUS_COMPUTE for a row with a NaN or +inf: what the session holds is then no
    // better, so it forgets all and zeroes its caches, and no checkpoint of it is valid any more.
    int32_t argmax(int64_t row);
    // Has the device pick the k best of every row in the passes to come, so that these few are all
    // that is copied: whether it can. 0: no longer.
    bool keep_top(int64_t k);
    int64_t n_top() const { return last_ != nullptr ? last_->shape.n_top : 0; }
    // What it picked of a row, best first, lower id on ties.
    const Candidate * top(int64_t row);
    // A row's logits: dst [n_vocab].
    void logits(int64_t row, float * dst);

    // The drafter's k best candidates for each of n_draft positions after last_token, which is
    // chosen but not appended. Moves no cursor. If the scores are not finite it has forgotten the
    // timeline so far.
    Draft draft(int32_t last_token, int64_t n_draft, int64_t k, bool log_sum_exp);
    // Makes room for verifies of up to n rows.
    void reserve_verify(int64_t n);
    // Runs the nodes of a tree after the timeline without appending them; every row's logits can
    // be read. parents: NULL for a chain.
    void verify(const int32_t * tokens, const int32_t * parents, int64_t n);
    // Appends the first n tokens of the open verify and forgets the rest. n = 0 forgets all, and
    // does nothing when none is open.
    void commit(int64_t n);
    // The same for a path of nodes, root first.
    void commit_path(const int32_t * nodes, int64_t n);

    // Back to position 0.
    void reset();
    Checkpoint take() const;
    // Back to a checkpoint of this session whose tokens its timeline still begins with.
    void restore(const Checkpoint & checkpoint);
    // Whether restore() would work.
    bool holds(const Checkpoint & checkpoint) const;
    // Forgets the tokens from a position on, and runs those before it again that they may have
    // spoiled, in a pass that nobody read a row after; throws DFL_STATUS_UNSUPPORTED if recurrent
    // layers have overwritten what they knew there.
    void truncate(int64_t position);

    uint64_t kv_bytes() const { return kv_.bytes(); }
    uint64_t recurrent_bytes() const { return recurrent_.bytes(); }
    // Of the states that it may keep, on the host.
    uint64_t kept_bytes() const { return MAX_KEPT * recurrent_.bytes(); }
    // Of these, on the CPU beside another device.
    uint64_t kv_beside_bytes() const { return kv_.bytes_on(devices_.cpu()); }
    uint64_t recurrent_beside_bytes() const { return recurrent_.bytes_on(devices_.cpu()); }
    uint64_t trace_beside_bytes() const { return recurrent_.trace_bytes_on(devices_.cpu()); }
    ArenaBytes arena_bytes() const { return graphs_.arena_bytes(); }
    // What the largest graph of a kind needs of it on the main device.
    uint64_t arena_bytes(GraphKind kind) const { return graphs_.arena_bytes(kind); }
    uint64_t pool_bytes() const { return graphs_.pool_bytes(); }
    uint64_t mask_bytes() const { return kv_.masks().bytes(); }
    uint64_t mask_beside_bytes() const { return kv_.masks().bytes_on(devices_.cpu()); }
    uint64_t mask_bytes_written() const {
        return kv_.masks().bytes_written() + (draft_ ? draft_->mask_bytes_written() : 0);
    }
    uint64_t draft_bytes() const { return draft_ ? draft_->bytes() : 0; }
    uint64_t trace_bytes() const { return recurrent_.trace_bytes(); }
    // Most rows of a verify now.
    int64_t verify_rows() const { return verify_rows_; }
    int64_t n_graphs_built() const { return graphs_.n_built(); }
    // Forward passes of the target so far.
    int64_t n_passes() const { return n_passes_; }
    uint64_t bytes_read() const { return devices_.bytes_read(); }
    // Names of operations that the device lacks and the CPU does.
    const std::set<std::string> & cpu_operations() const { return graphs_.cpu_operations(); }
    uint64_t submit_ns() const { return devices_.main().submit_ns(); }
    uint64_t wait_ns() const { return devices_.main().wait_ns(); }

  private:
    LayerPlace layer_place();
    // Whether n tokens can stand after a position.
    void check_tokens(const int32_t * tokens, int64_t n, int64_t after) const;
    // The rows of a pass. Those of a verify may end with padding: copies of the root that write
    // where nobody looks.
    struct Pass {
        GraphKind kind = GraphKind::APPEND;
        std::vector<int32_t> tokens, positions;
        std::vector<int64_t> cells;
        std::vector<int64_t> feature_rows; // empty: no taps
        Tree tree;                         // of a verify
        std::vector<bool> finite;          // of a verify: whether a row's logits are
        int64_t n = 0;                     // rows that are not padding

        int64_t n_rows() const { return static_cast<int64_t>(tokens.size()); }
    };
    Pass plan_append(const int32_t * tokens, int64_t n) const;
    Pass plan_verify(const Tree & tree) const;
    void take_cells(Pass & pass);
    void take_feature_rows(Pass & pass, bool inject);
    // Runs the rows, which take cells; does not move the cursor. n_out: 0, 1 (the last) or all.
    LiveGraph & run(Pass & pass, int64_t n_out, bool inject);
    bool selects_top(int64_t k) const;
    // Makes a target's pass pick the k best of its rows.
    void pick_top(BatchShape & shape, int64_t k) const;
    void build_forward(LiveGraph & live, bool taps);
    void set_inputs(LiveGraph & live, const Pass & pass);
    void append(const int32_t * tokens, int64_t n, int64_t n_out, bool inject);
    void reserve_graphs();
    void reserve_verify_graphs(int64_t n);
    // Most accepted nodes that recurrent states move along in one graph: they are gathered from the
    // trace first, at 3.5 MiB a node of a 27B.
    static constexpr int64_t MOST_STEPS = 16;
    // The graph that moves recurrent states along so many accepted nodes.
    LiveGraph & promote_graph(int64_t n_accepted);
    // Along n nodes of an accepted path from `first` on, those before them being done.
    void promote_state(const int32_t * path, int64_t first, int64_t n);
    void check_no_open_verify() const;
    void check_row(int64_t row) const;
    // Of the readable rows: whether their logits are finite. What is not finite in a pass's input,
    // or in a cell that a row sees, makes all logits of the row NaN, so one of each tells.
    std::vector<bool> finite_rows() const;
    // Takes note of a row that was read. Throws DFL_STATUS_COMPUTE, and starts anew, if it is not
    // finite.
    void note_row(int64_t row, bool is_finite);
    // Forgets all, zeroes every cache and voids checkpoints.
    void start_anew();
    // Takes note of a row that can be read and nobody has.
    void prove();
    // Zeroes the rows of tokens from a position on that may be not finite, as they are forgotten:
    // some kernels multiply what a mask hides by 0.
    void clear_unproven(int64_t position);
    void close_verify();
    // The last place up to a position where the rows before it owe nothing to the tokens behind:
    // in a pass that no finite row was read after, one that is not finite may have spoiled all.
    int64_t sound(int64_t position) const;
    // Remembers what recurrent layers know here, in place of the oldest that is too many.
    void keep_state();
    // And forgets those that were kept after a position.
    void drop_states(int64_t position);
    void forget_from(int64_t position);

    std::shared_ptr<const Model> model_;
    SessionParams params_;
    Devices devices_;
    bool recurs_; // the model has recurrent layers
    KvCache kv_;
    RecurrentCache recurrent_;
    bool walks_; // our own code runs recurrent layers
    bool fused_; // a chain of them is one operation
    GraphSizes sizes_;
    GraphPool graphs_;
    std::unique_ptr<DraftState> draft_;
    uint64_t caches_;             // names what they hold, in this process
    std::vector<int32_t> tokens_; // the committed timeline
    std::vector<KeptState> kept_; // of it, the oldest first; none without recurrent layers
    int64_t keep_at_ = 0;         // where a prefill keeps the next one; 0: nowhere
    int64_t n_proven_ = 0;        // of them, those that a finite row was read after
    std::vector<int64_t> passes_; // where those begin that appended the others
    int64_t n_top_ = 0;           // of keep_top()
    LiveGraph * last_ = nullptr;  // graph whose logits are readable
    int64_t first_out_ = 0;       // its first readable row
    int64_t n_out_rows_ = 0;
    Pass open_; // rows of a verify that waits for its commit
    int64_t verify_rows_ = 0;
    int64_t n_passes_ = 0;
};

} // namespace dfl
