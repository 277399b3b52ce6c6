// Cache of graphs by shape. Graphs share one arena, as only one runs at a time, so inputs must be
// written before every run. Only the last split graph of a kind is cached, with memory of its own.
#pragma once

#include "cache/kv_cache.h"
#include "graph/candidate.h"
#include "graph/io_block.h"
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

// Largest logits of each row, selected by the graph.
struct TopOutputs {
    // Indices of each row's n_top largest logits, unordered.
    TopRows rows;
    // Selected logits, f32 [1, n_top, rows].
    ggml_tensor * logits = nullptr;
    // Probabilities of the tokens of the selected logits; of all tokens if n_top is 0.
    ggml_tensor * probabilities = nullptr;
    // Log-sum-exp of the logits of each row, which the CPU computes in place of probabilities.
    ggml_tensor * log_sum_exp = nullptr;
    ggml_tensor * sums = nullptr; // sums of all logits of each row: NaN if one is NaN
};

struct CachedGraph {
    // Writes an input; needed before each run. Skips an input that no node reads.
    template <typename T>
    void write(ggml_tensor * input, const std::function<void(T * data)> & fill) const;
    template <typename T>
    void write(ggml_tensor * input, const std::vector<T> & values) const {
        write<T>(input, [&](T * data) { std::copy(values.begin(), values.end(), data); });
    }
    // Returns the host copy of a result, valid until the next graph runs.
    template <typename T>
    const T * values(const ggml_tensor * result) const;
    // Writes text positions for rope; for M-RoPE as time, height and width, then 0.
    void write_positions(ggml_tensor * input, const std::vector<int32_t> & positions) const;

    BatchShape shape;
    ggml_context_ptr ctx;
    ggml_cgraph * graph = nullptr;
    CpuNodes cpu_nodes;
    GraphInputs in;
    // Rows of FeatureRing that a pass writes (i64 [n_rows]) or an injection reads (i32 [n_rows]).
    ggml_tensor * feature_rows = nullptr;
    PromoteInputs promote;
    TopOutputs top;
    ggml_tensor * logits = nullptr;     // logits of the pass, f32 [n_vocab, n_out]
    ggml_tensor * row_sums = nullptr;   // sum of the last layer's input of each row, [1, n_rows]
    ggml_tensor * argmax = nullptr;     // best token ids, i32 [n_out]; NULL: logits on the host
    ggml_tensor * firsts = nullptr;     // first logit of each row; NULL: logits on the host
    std::vector<Candidate> candidates;  // selected candidates, [n_out][n_top]; empty until sorted
    std::vector<ggml_tensor *> results; // small results, which each run copies to the host
    IoBlock * block = nullptr;          // block of inputs and results; NULL: they are in place
    IoBytes io_bytes;                   // bytes in `block`
    std::vector<std::vector<char>> copies; // host copies of results that are in no block
    SplitScheduler * scheduler = nullptr;  // scheduler that runs a split graph; NULL: not split
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
    } else {
        std::vector<T> staging(ggml_nelements(input));
        fill(staging.data());
        ggml_backend_tensor_set(input, staging.data(), 0, ggml_nbytes(input));
    }
}

template <typename T>
const T * CachedGraph::values(const ggml_tensor * result) const {
    if (ggml_backend_buffer_is_host(result->buffer)) {
        return static_cast<const T *>(result->data);
    }
    if (block != nullptr) {
        return static_cast<const T *>(block->host(result));
    }
    const ggml_tensor * owner = result->view_src != nullptr ? result->view_src : result;
    const auto at = std::find(results.begin(), results.end(), owner);
    return reinterpret_cast<const T *>(copies[at - results.begin()].data());
}

// Adds the nodes of a graph of shape cached.shape to cached.graph, and its inputs to cached.in.
using GraphBuilder = std::function<void(CachedGraph & cached)>;

GraphInputs make_inputs(ggml_context * ctx, const Hparams & hp, const KvCache & kv,
                        const BatchShape & shape);
ggml_tensor * make_input(ggml_context * ctx, ggml_type type, int64_t ne0, int64_t ne1,
                         const char * name);
// Keeps a result's memory from being reused by later nodes.
void mark_output(ggml_tensor * tensor);
// Adds a result to the graph and marks it as output.
ggml_tensor * add_output(CachedGraph & cached, ggml_tensor * tensor);
// Adds a small result to the graph, which each run copies to the host.
ggml_tensor * add_result(CachedGraph & cached, ggml_tensor * tensor);
// Adds the selection of the cached.shape.n_top largest logits of each row, on the device.
void add_top_rows(CachedGraph & cached, ggml_tensor * logits);
// Marks logits as output and, unless they are in host memory, adds their argmax and first values.
void finish_logits(CachedGraph & cached, ggml_tensor * logits, const Backend & backend);

class GraphPool {
  public:
    GraphPool(Devices & devices, size_t max_nodes);

    // Returns the cached graph of a shape, or builds it. Throws DFL_STATUS_MEMORY.
    CachedGraph & get(const BatchShape & shape, const GraphBuilder & build);
    // Runs a cached graph and copies its results to the host. Throws DFL_STATUS_COMPUTE or
    // DFL_STATUS_MEMORY.
    void compute(CachedGraph & cached);
    // Returns names of operations that the main device lacks, which the CPU runs instead.
    const std::set<std::string> & cpu_operations() const { return cpu_operations_; }
    // Forgets all graphs; call before freeing a tensor that they use.
    void clear() { cached_.clear(); }
    // Returns the bytes of all compute buffers: an upper bound for a split hypothetical GPU.
    ArenaBytes arena_bytes() const;
    // Returns the bytes on the main device of the largest graph of a kind.
    uint64_t arena_bytes(GraphKind kind) const;
    // Returns the estimated bytes of the CUDA backend's memory pool; 0 for other devices.
    uint64_t pool_bytes() const { return pool_bytes_; }
    int64_t n_built() const { return n_built_; }
    // Returns the number of nodes of the largest graph, views included.
    int64_t largest_n_nodes() const { return largest_n_nodes_; }

  private:
    CachedGraph build_graph(const BatchShape & shape, const GraphBuilder & build) const;
    // True if a graph is split. Records the operations that the main device lacks.
    bool is_split(const CachedGraph & fresh);
    void forget_in_arena();
    void place_in_block(CachedGraph & fresh);
    CachedGraph & get_in_arena(CachedGraph fresh);
    CachedGraph & get_scheduled(CachedGraph fresh, const GraphBuilder & build);
    uint64_t arena_bytes_for(ggml_cgraph * graph) const;
    void allocate(CachedGraph & fresh, uint64_t needed);
    void record_size(const CachedGraph & cached, const ArenaBytes & needed);

    Devices & devices_;
    Backend & backend_;
    size_t max_nodes_;
    // Schedulers of split graphs by kind. A scheduler holds one graph; kinds alternate in a round.
    std::map<GraphKind, SplitScheduler> schedulers_;
    std::set<GraphKind> split_kinds_;
    std::set<std::string> cpu_operations_;
    ggml_gallocr_ptr arena_;
    std::unique_ptr<IoBlock> block_; // inputs and results; NULL: they are in host memory
    std::list<CachedGraph> cached_;  // cached graphs, most recently used first
    int64_t n_built_ = 0, largest_n_nodes_ = 0, n_uncaptured_runs_ = 0;
    std::map<GraphKind, ArenaBytes> needed_; // memory of the largest graph of each kind
    uint64_t pool_bytes_ = 0;
};

} // namespace dfl
