// The life cycle of a graph: build, allocate, set inputs, compute, read. Graphs are cached by shape
// and share one arena: only one runs at a time, and inputs are written before every run. A
// graph split over two devices has memory of its own, and only one of its kind is cached.
#pragma once

#include "cache/kv_cache.h"
#include "graph/candidate.h"
#include "graph/input_block.h"
#include "graph/split_graph.h"
#include "graph/top_rows.h"
#include "layers/cpu_ops/graph_context.h"

#include <algorithm>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace dfl {

// Selections among a graph's logits.
struct TopOutputs {
    TopRows rows;                          // n_top of n_draft rows, in any order
    ggml_tensor * logits = nullptr;        // f32 [1, n_top, n_draft], of these rows
    ggml_tensor * probabilities = nullptr; // f32, the same; or [n_vocab, n_draft] where n_top is 0
    ggml_tensor * log_sum_exp = nullptr;   // f32 [n_draft], in their place where own code sums
    ggml_tensor * sums = nullptr;          // f32 [n_out] of a target's logits: NaN if one is
};

struct CachedGraph {
    // Writes an input, before each run. One that no node reads has no memory.
    template <typename T>
    void write(ggml_tensor * input, const std::function<void(T * data)> & fill) const;
    template <typename T>
    void write(ggml_tensor * input, const std::vector<T> & values) const {
        write<T>(input, [&](T * data) { std::copy(values.begin(), values.end(), data); });
    }
    // Writes positions of text as rope takes them; M-RoPE: as time, height and width, then 0.
    void write_positions(ggml_tensor * input, const std::vector<int32_t> & positions) const;

    BatchShape shape;
    ggml_context_ptr ctx;
    ggml_cgraph * graph = nullptr;
    CpuNodes cpu_nodes;
    GraphInputs in;
    // Rows of FeatureRing, [n_rows]: i64 of a pass, which writes them; i32 of an injection.
    ggml_tensor * feature_rows = nullptr;
    PromoteInputs promote;
    TopOutputs top;
    ggml_tensor * logits = nullptr;    // [n_vocab, n_out]
    ggml_tensor * row_sums = nullptr;  // [1, n_rows]: of what enters the target's last layer
    ggml_tensor * argmax = nullptr;    // i32 [n_out]; only where logits do not lie in host memory
    std::vector<int32_t> best;         // argmax on the host, once somebody asked for it
    std::vector<Candidate> candidates; // top.rows on the host, [n_out][n_top]
    std::vector<float> sums;           // top.sums on the host
    InputBlock * block = nullptr;      // inputs on the host until a run; NULL: written in place
    size_t input_bytes = 0;            // bytes of block
    SplitScheduler * scheduler = nullptr; // runs the graph; NULL: the device does
};

template <typename T>
void CachedGraph::write(ggml_tensor * input, const std::function<void(T * data)> & fill) const {
    if (input->buffer == nullptr) {
        return;
    }
    if (block != nullptr) {
        fill(static_cast<T *>(block->host(input)));
    } else if (ggml_backend_buffer_is_host(input->buffer)) {
        fill(static_cast<T *>(input->data));
    } else { // of a graph split over two devices
        std::vector<T> staging(ggml_nelements(input));
        fill(staging.data());
        ggml_backend_tensor_set(input, staging.data(), 0, ggml_nbytes(input));
    }
}

// Adds the nodes of cached.shape to cached.graph and its inputs to `cached`.
using GraphBuilder = std::function<void(CachedGraph & cached)>;

// Inputs of a forward pass for these layers.
GraphInputs make_inputs(ggml_context * ctx, const Hparams & hp, const KvCache & kv,
                        const BatchShape & shape);
ggml_tensor * make_input(ggml_context * ctx, ggml_type type, int64_t ne0, int64_t ne1,
                         const char * name);
// Keeps a result's memory from being reused before the next run.
void mark_output(ggml_tensor * tensor);
// Adds a result to the graph and keeps it.
ggml_tensor * add_output(CachedGraph & cached, ggml_tensor * tensor);
// Adds the selection of the cached.shape.n_top largest of each row of logits, on the device.
void add_top_rows(CachedGraph & cached, ggml_tensor * logits);
// Marks logits as results and, where they are not in host memory, adds their argmax.
void finish_logits(CachedGraph & cached, ggml_tensor * logits, const Backend & backend);

class GraphPool {
  public:
    // max_nodes: of the largest graph.
    GraphPool(Devices & devices, size_t max_nodes);

    // The cached graph of this shape, built if there is none. Throws DFL_STATUS_MEMORY.
    CachedGraph & get(const BatchShape & shape, const GraphBuilder & build);
    // Runs a cached graph. Throws DFL_STATUS_COMPUTE or DFL_STATUS_MEMORY.
    void compute(CachedGraph & cached);
    // Names of operations that the device lacks and the CPU does.
    const std::set<std::string> & cpu_operations() const { return cpu_operations_; }
    // Forgets all graphs: a tensor they use goes away.
    void clear() { cached_.clear(); }
    // Of the memory for all results. Of a hypothetical GPU that has the CPU beside it: at most.
    ArenaBytes arena_bytes() const;
    // What the largest graph of a kind needs of it on the main device.
    uint64_t arena_bytes(GraphKind kind) const;
    // What the device's own pool takes beside it; 0 where there is none.
    uint64_t pool_bytes() const { return pool_bytes_; }
    // Graphs built so far: a round that builds none reuses what is there.
    int64_t n_built() const { return n_built_; }
    // Nodes of the largest of them, views included.
    int64_t largest_n_nodes() const { return largest_n_nodes_; }

  private:
    CachedGraph build_graph(const BatchShape & shape, const GraphBuilder & build) const;
    // Whether a graph is split over two devices. Notes the operations that the main one lacks.
    bool is_split(const CachedGraph & fresh);
    void forget_in_arena();
    void place_inputs(CachedGraph & fresh);
    CachedGraph & get_in_arena(CachedGraph fresh);
    CachedGraph & get_scheduled(CachedGraph fresh, const GraphBuilder & build);
    uint64_t arena_bytes_for(ggml_cgraph * graph) const;
    void allocate(CachedGraph & fresh, uint64_t needed);
    void record_size(const CachedGraph & cached, const ArenaBytes & needed);

    Devices & devices_;
    Backend & backend_; // the main one
    size_t max_nodes_;
    // Of graphs split over two devices. Each holds one cached graph, so kinds that alternate within
    // a round have one each.
    std::map<GraphKind, SplitScheduler> schedulers_;
    std::set<GraphKind> split_kinds_; // kinds of graphs that were split over two devices
    std::set<std::string> cpu_operations_;
    ggml_gallocr_ptr arena_;
    std::unique_ptr<InputBlock> block_; // NULL where the host writes inputs in their place
    std::list<CachedGraph> cached_;     // most recently used first
    int64_t n_built_ = 0, largest_n_nodes_ = 0;
    std::map<GraphKind, ArenaBytes> needed_; // by the largest graph
    uint64_t pool_bytes_ = 0;
};

} // namespace dfl
