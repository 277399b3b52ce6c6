// Graphs split between a device and the CPU, run by ggml's scheduler, which holds one at a time.
#pragma once

#include "device/devices.h"

#include <cstdint>
#include <ggml-cpp.h>
#include <set>
#include <string>

namespace dfl {

// Bytes of compute buffers by device.
struct ArenaBytes {
    uint64_t main = 0;
    uint64_t cpu_split = 0; // bytes on the CPU if the main device is another
};

ArenaBytes max_of(const ArenaBytes & a, const ArenaBytes & b);

// Returns names of the operations of a graph that the main device lacks. Throws
// DFL_STATUS_UNSUPPORTED if such an operation writes to a cache, which must stay on the device.
std::set<std::string> unsupported_operations(const Backend & backend, ggml_cgraph * graph);

// True if a graph uses tensors in the CPU's part of a split model.
bool reaches_cpu_split(const Backend & backend, ggml_cgraph * graph);

// Gives a graph a number by which ggml's CUDA backend finds its captured graph without comparing
// all nodes. The graph must have its memory already, and keep it.
void set_graph_id(Devices & devices, ggml_cgraph * graph);

class SplitScheduler {
  public:
    SplitScheduler(Devices & devices, size_t max_nodes);

    // Returns the memory that a graph needs; the graph can then neither run nor be measured again.
    // op_offload: the device computes with the CPU's tensors if its backend finds that worthwhile.
    ArenaBytes measure(ggml_cgraph * graph, bool op_offload) const;
    // Gives a graph the memory of the previous graph, enlarged if needed. False if memory is short.
    bool allocate(ggml_cgraph * graph, bool op_offload);
    // Runs the allocated graph. Throws DFL_STATUS_COMPUTE or DFL_STATUS_MEMORY.
    void compute(ggml_cgraph * graph);
    ArenaBytes bytes() const;

  private:
    Devices & devices_;
    size_t max_nodes_;
    ggml_backend_sched_ptr scheduler_;
};

} // namespace dfl
