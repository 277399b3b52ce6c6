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

// Where the threads of a graph wait for each other. They come every few microseconds, so they look
// out for each other before they let others have the core. Each tells all others by itself: what
// two cores both write goes back and forth between them, which takes longer than a small node.
class Barrier {
  public:
    explicit Barrier(int n_threads) : seen_(n_threads) {}

    // Thread ith of nth, at most as many as it was made for.
    void wait(int ith, int nth) {
        const unsigned turn = seen_[ith].turn.load(std::memory_order_relaxed) + 1;
        seen_[ith].turn.store(turn, std::memory_order_release);
        for (int other = 0; other < nth; ++other) {
            while (static_cast<int>(seen_[other].turn.load(std::memory_order_acquire) - turn) < 0) {
                look_again();
            }
        }
    }

  private:
    struct alignas(128) Seen { // a core fetches lines in pairs
        std::atomic<unsigned> turn{0};
    };

    static void look_again();

    std::vector<Seen> seen_;
};

// A node of a graph, and the nodes it computes after its own in place of ggml.
struct CpuStep {
    std::unique_ptr<CpuNode> node;
    ggml_tensor * dst = nullptr;
    Barrier * barrier = nullptr;
    std::vector<const CpuStep *> then = {};
};

struct CpuNodes {
    int n_threads = 0;    // that compute the graph; 0: not the CPU backend's
    int most_threads = 0; // that compute a node, also of a graph that goes over two devices
    std::vector<std::unique_ptr<CpuStep>> list = {};
    std::unique_ptr<Barrier> barrier = {}; // of those that were joined
};

// Hands out the parts of one run.
class Shares {
  public:
    // body(part) for every part that falls to this thread. Where a part is `long`, whichever thread
    // comes next gets the next, so that a core that is slow or busy elsewhere holds nobody up.
    template <class Body>
    void share_out(int64_t n, bool is_long, int ith, int nth, Body && body) {
        if (!is_long) {
            for (int64_t part = n * ith / nth; part < n * (ith + 1) / nth; ++part) {
                body(part);
            }
            return;
        }
        for (int64_t part; (part = next(n, nth)) < n;) {
            body(part);
        }
    }

  private:
    // The next of n parts, or n: there is none. Every thread of a run comes until it gets none.
    int64_t next(int64_t n, int nth) {
        // Each run takes n tickets that are parts and one a thread that is none, so it leaves a
        // multiple of their number behind.
        const int64_t run = n + nth;
        return std::min(n, taken_.fetch_add(1, std::memory_order_relaxed) % run);
    }

    std::atomic<int64_t> taken_{0};
};

// A node of shape [ne0, ne1] that reads args.
ggml_tensor * add_cpu_node(ggml_context * ctx, CpuNodes & nodes, ggml_type type, int64_t ne0,
                           int64_t ne1, const std::vector<ggml_tensor *> & args,
                           std::unique_ptr<CpuNode> node);
ggml_tensor * add_cpu_node(Build & b, ggml_type type, int64_t ne0, int64_t ne1,
                           const std::vector<ggml_tensor *> & args, std::unique_ptr<CpuNode> node);

// Lets the first of neighbouring nodes compute them all. ggml's threads wait for each other after
// every node by OpenMP's barrier, which asks the kernel each time and takes as long as a small
// node.
void join_neighbours(ggml_cgraph * graph, CpuNodes & nodes);

} // namespace dfl
