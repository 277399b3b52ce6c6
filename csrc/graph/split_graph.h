// Graphs of which some nodes run on a device and others on the CPU beside it, by ggml's scheduler,
// which holds one graph at a time.
#pragma once

#include "device/devices.h"

#include <cstdint>
#include <ggml-cpp.h>
#include <set>
#include <string>

namespace dfl {

// Bytes of a compute buffer by where they are.
struct ArenaBytes {
    uint64_t main = 0;
    uint64_t cpu_split = 0; // on the CPU beside the main device
};

ArenaBytes max_of(const ArenaBytes & a, const ArenaBytes & b);

// Names of a graph's operations that the main device lacks. Throws DFL_STATUS_UNSUPPORTED where one
// would write to its caches, which cannot be moved.
std::set<std::string> unsupported_operations(const Backend & backend, ggml_cgraph * graph);

// True if a graph works on tensors in the CPU's part of a split model.
bool reaches_cpu_split(const Backend & backend, ggml_cgraph * graph);

// Gives a graph of the main device a number, by which ggml's CUDA backend knows that it is the one
// it captured. Without one it compares every node with those captured, each time: 0.1 ms for a
// thousand nodes. The graph must have its memory, and keep it.
void set_graph_id(Devices & devices, ggml_cgraph * graph);

class SplitScheduler {
  public:
    // For devices of which one is the CPU beside the other. max_nodes: of the largest graph.
    SplitScheduler(Devices & devices, size_t max_nodes);

    // Memory that a graph needs; it can neither run nor be measured again.
    ArenaBytes measure(ggml_cgraph * graph);
    // Gives a graph memory in place of the one before. False: there is not enough.
    bool allocate(ggml_cgraph * graph);
    // Runs the graph it holds. Throws DFL_STATUS_COMPUTE or DFL_STATUS_MEMORY.
    void compute(ggml_cgraph * graph);
    ArenaBytes bytes() const;

  private:
    Devices & devices_;
    ggml_backend_sched_ptr scheduler_;
};

} // namespace dfl
