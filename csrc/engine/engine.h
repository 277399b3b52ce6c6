// What costs memory and is there once, however many timelines use it: the model, the drafter and
// its state, K/V cells and recurrent slots, graphs and their arena, threads. An engine runs passes
// and knows nothing of tokens that were or will be: that is a Sequence's.
#pragma once

#include "arch/model.h"
#include "cache/cache.h"
#include "draft/draft_state.h"
#include "engine/pass.h"
#include "graph/graph.h"
#include "graph/graph_sizes.h"

#include <memory>
#include <set>
#include <string>
#include <vector>

namespace dfl {

class Sequence;

// In the cell table: the rows of a verify that waits for its commit.
constexpr int32_t OPEN_VERIFY = 1;

// How recurrent layers run: in our own code (the CPU has some), or by ggml's operation for chains
// and its stock operations for trees, or by its stock operations alone.
enum class DeltaForm { OWN, FUSED, STOCK };

struct EngineParams {
    int64_t n_ctx = 4096;   // tokens a sequence can hold
    int64_t n_ubatch = 512; // most rows of one pass
    int n_threads = 0;      // 0: default_threads()
    ggml_type type_k = GGML_TYPE_F16;
    ggml_type type_v = GGML_TYPE_F16;
    std::shared_ptr<const Drafter> drafter; // may be empty
    int64_t draft_window = 4096;            // target positions the drafter sees
    DeltaForm delta_form = DeltaForm::OWN;  // the first that works, from this one on
};

// Memory of one use in one place.
struct MemoryUse {
    const char * name;
    std::string place; // name of the device
    uint64_t bytes;
};

class Engine {
  public:
    Engine(std::shared_ptr<const Model> model, const EngineParams & params);
    Engine(const Engine &) = delete; // its parts point to each other
    Engine & operator=(const Engine &) = delete;

    const Model & model() const { return *model_; }
    int64_t n_ctx() const { return params_.n_ctx; }
    int64_t n_ubatch() const { return params_.n_ubatch; }
    int n_threads() const { return devices_.main().n_threads(); }
    // The model has recurrent layers.
    bool recurs() const { return recurs_; }

    // Most tokens of a row that keep_top() may be asked for.
    static constexpr int64_t MAX_TOP = DFL_MAX_TOP;
    // Most rows a verify may be asked to have room for.
    static constexpr int64_t MAX_VERIFY = DFL_MAX_VERIFY;
    // States of recurrent layers that a sequence keeps at a time, on the host.
    static constexpr size_t MAX_KEPT = 2;

    // Has the device pick the k best of every row in the passes to come, so that these few are all
    // that is copied: whether it can. 0: no longer.
    bool keep_top(int64_t k);
    // Makes room for verifies of up to n rows.
    void reserve_verify(int64_t n);
    // Most rows of a verify now.
    int64_t verify_rows() const { return verify_rows_; }

    // Of one use after another, none of 0 bytes.
    std::vector<MemoryUse> memory() const;
    // The kind of graph that decides the size of the arena: "prefill", "verify" or "draft".
    const char * largest_graph() const;
    int64_t n_graphs_built() const { return graphs_.n_built(); }
    // Forward passes of the target so far.
    int64_t n_passes() const { return n_passes_; }
    uint64_t bytes_read() const { return devices_.bytes_read(); }
    uint64_t mask_bytes_written() const {
        return kv_.masks().bytes_written() + (draft_ ? draft_->mask_bytes_written() : 0);
    }
    // Names of operations that the device lacks and the CPU does.
    const std::set<std::string> & cpu_operations() const { return graphs_.cpu_operations(); }
    uint64_t submit_ns() const { return devices_.main().submit_ns(); }
    uint64_t wait_ns() const { return devices_.main().wait_ns(); }

    // What follows is for sequences.

    // A sequence takes its place before it is used and gives it back in the end. Throws
    // DFL_STATUS_UNSUPPORTED if another has it, DFL_STATUS_ARGUMENT if there is no memory to run
    // in.
    void enter(Sequence * sequence);
    void leave(const Sequence * sequence);

    Backend & main() { return devices_.main(); }
    const Backend & main() const { return devices_.main(); }
    KvCache & kv() { return kv_; }
    RecurrentCache & recurrent() { return recurrent_; }
    // NULL without a drafter.
    DraftState * draft() { return draft_.get(); }
    GraphPool & graphs() { return graphs_; }
    // Rows of the graph that verifies n.
    int64_t padded_verify(int64_t n) const { return sizes_.verify_rows(n, model_->weights()); }
    // Runs the rows, which take cells, and gives these back on an error. n_out: rows whose logits
    // can be read afterwards: 0, 1 (the last) or all. inject: into the drafter's K/V, of a prefill.
    LiveGraph & run(Pass & pass, int64_t n_out, bool inject);
    // Moves recurrent states along the first n nodes of an accepted path. On an error some layers'
    // may have moved.
    void promote_along(const int32_t * path, int64_t n);

  private:
    LayerPlace layer_place();
    void reserve_graphs();
    void reserve_verify_graphs(int64_t n);
    bool selects_top(int64_t k) const;
    // Makes a target's pass pick the k best of its rows.
    void pick_top(BatchShape & shape, int64_t k) const;
    void build_forward(LiveGraph & live, bool taps);
    void take_cells(Pass & pass);
    void take_feature_rows(Pass & pass, bool inject);
    void set_inputs(LiveGraph & live, const Pass & pass);
    // Most accepted nodes that recurrent states move along in one graph: they are gathered from the
    // trace first, at 3.5 MiB a node of a 27B.
    static constexpr int64_t MOST_STEPS = 16;
    // The graph that moves recurrent states along so many accepted nodes.
    LiveGraph & promote_graph(int64_t n_accepted);
    // Along n nodes of an accepted path from `first` on, those before them being done.
    void promote_state(const int32_t * path, int64_t first, int64_t n);

    std::shared_ptr<const Model> model_;
    EngineParams params_;
    Devices devices_;
    bool recurs_;
    KvCache kv_;
    RecurrentCache recurrent_;
    bool walks_; // our own code runs recurrent layers
    bool fused_; // a chain of them is one operation
    GraphSizes sizes_;
    GraphPool graphs_;
    std::unique_ptr<DraftState> draft_;
    Sequence * sequence_ = nullptr; // the one there is
    int64_t n_top_ = 0;             // of keep_top()
    int64_t verify_rows_ = 0;
    int64_t n_passes_ = 0;
};

} // namespace dfl
