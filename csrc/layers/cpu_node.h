// Graph nodes computed by our own code. They run on the CPU backend only.
#pragma once

#include <algorithm>
#include <atomic>
#include <ggml.h>
#include <memory>
#include <vector>

namespace dfl {

struct Build;

// One node's work, owned by its graph.
class CpuNode {
  public:
    virtual ~CpuNode() = default;
    // Thread ith of nth computes its share of dst. All nth are in here at once, and none passes to
    // the next node before all have left. Must not throw.
    virtual void compute(ggml_tensor * dst, int ith, int nth) = 0;
};

struct CpuNodes {
    int n_threads = 0; // that compute the graph; 0: not the CPU backend's
    std::vector<std::unique_ptr<CpuNode>> list;
};

// Hands out the parts of one run to whichever thread comes for the next, so that a core that is
// slow or busy elsewhere holds nobody up. Every thread of a run must come until it gets none.
class Shares {
  public:
    // The next of n parts, or n: there is none.
    int64_t next(int64_t n, int nth) {
        // Each run takes n tickets that are parts and one a thread that is none, so it leaves a
        // multiple of their number behind.
        const int64_t run = n + nth;
        return std::min(n, taken_.fetch_add(1, std::memory_order_relaxed) % run);
    }

  private:
    std::atomic<int64_t> taken_{0};
};

// A node of shape [ne0, ne1] that reads args.
ggml_tensor * add_cpu_node(Build & b, ggml_type type, int64_t ne0, int64_t ne1,
                           const std::vector<ggml_tensor *> & args, std::unique_ptr<CpuNode> node);

} // namespace dfl
