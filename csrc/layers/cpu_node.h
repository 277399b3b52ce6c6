// Graph nodes computed by our own code. They run on the CPU backend only.
#pragma once

#include <ggml.h>
#include <initializer_list>
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

using CpuNodes = std::vector<std::unique_ptr<CpuNode>>;

// A node of shape [ne0, ne1] that reads args.
ggml_tensor * add_cpu_node(Build & b, ggml_type type, int64_t ne0, int64_t ne1,
                           std::initializer_list<ggml_tensor *> args,
                           std::unique_ptr<CpuNode> node);

} // namespace dfl
