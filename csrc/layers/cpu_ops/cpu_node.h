// Graph nodes computed by our own code. They run on the CPU backend only.
#pragma once

#include <algorithm>
#include <atomic>
#include <ggml.h>
#include <memory>
#include <vector>

namespace dfl {

struct GraphContext;
struct PackedMatrix;

// Hands out the parts of a node's work, of one node after the other. All threads of a run share out
// each of them, and none before all are done with the one before.
class WorkShares {
  public:
    explicit WorkShares(int n_threads) : own_(n_threads) {}

    // body(part) for the parts [0, n), by thread ith of nth for those of its share, which are the
    // same in every run: what they read and write lies in its core's caches then. Where parts are
    // `long`, whoever has done its share takes of the others', so that a core that is slow or busy
    // elsewhere holds nobody up.
    template <class Body>
    void share_out(int64_t n, bool is_long, int ith, int nth, Body && body) {
        if (!is_long) {
            for (int64_t part = n * ith / nth; part < n * (ith + 1) / nth; ++part) {
                body(part);
            }
            return;
        }
        const int turn = own_[ith].turn;
        own_[ith].turn = 1 - turn;
        own_[ith].taken[1 - turn].store(0, std::memory_order_relaxed); // for the node after this
        for (int i = 0; i < nth; ++i) {
            const int64_t of = (ith + i) % nth, first = n * of / nth, end = n * (of + 1) / nth;
            std::atomic<int64_t> & taken = own_[of].taken[turn];
            for (int64_t part;
                 (part = first + taken.fetch_add(1, std::memory_order_relaxed)) < end;) {
                body(part);
            }
        }
    }

    // Called before each run by one thread, as the number of threads may change between runs.
    void begin_run() {
        for (Own & own : own_) {
            own.turn = 0;
            own.taken[0].store(0, std::memory_order_relaxed);
        }
    }

  private:
    struct alignas(128) Own {               // a core fetches lines in pairs
        std::atomic<int64_t> taken[2] = {}; // parts of its share, in turns of nodes
        int turn = 0;
    };

    std::vector<Own> own_;
};

// One node's work, owned by its graph.
class CpuNode {
  public:
    virtual ~CpuNode() = default;
    // Thread ith of nth computes its share of dst. All nth are in here at once, and none passes to
    // the next node before all have left. nth is at most CpuNodes::max_threads, and not always the
    // same. Must not throw.
    virtual void compute(ggml_tensor * dst, int ith, int nth) = 0;
    // Weights that it multiplies with.
    virtual std::vector<const PackedMatrix *> weights() const { return {}; }

    void use(WorkShares & shares) { shares_ = &shares; }

  protected:
    // body(part) for every part that falls to this thread; once a run, by all threads.
    template <class Body>
    void share_out(int64_t n, bool is_long, int ith, int nth, Body && body) {
        shares_->share_out(n, is_long, ith, nth, body);
    }

  private:
    WorkShares * shares_ = nullptr; // of its graph
};

// Where the threads of a graph wait for each other. They meet every few microseconds, so they spin.
// Each thread tells the others by a cache line of its own: a line that two cores write takes longer
// to go back and forth than a small node takes to compute.
class Barrier {
  public:
    explicit Barrier(int n_threads) : arrivals_(n_threads) {}

    // Thread ith of nth, at most as many as it was made for.
    void wait(int ith, int nth) {
        const unsigned phase = arrivals_[ith].phase.load(std::memory_order_relaxed) + 1;
        arrivals_[ith].phase.store(phase, std::memory_order_release);
        for (int other = 0; other < nth; ++other) {
            for (int n_polls = 0; !has_arrived(other, phase); ++n_polls) {
                if (n_polls == SHORT_WAIT) {
                    wait_long(other, phase);
                    break;
                }
                pause();
            }
        }
    }

    // Called before each run by one thread, so that all threads start at the same turn.
    void begin_run();

    // What a run lost to threads that came late, which is what a thread does that waits for a core.
    struct Waits {
        int64_t lost_ns = 0;
        int n_late = 0; // threads that were waited for
    };
    // Called with the number of threads of the run that ended.
    Waits waits(int nth) const;

  private:
    struct alignas(128) Arrival { // a core fetches lines in pairs
        std::atomic<unsigned> phase{0};
        std::atomic<int64_t> waited_for_ns{0}; // by the others
    };

    // Looks before the clock is read, some 20 us: a thread that runs comes sooner.
    static constexpr int SHORT_WAIT = 1000;

    bool has_arrived(int other, unsigned phase) const {
        return static_cast<int>(arrivals_[other].phase.load(std::memory_order_acquire) - phase) >=
               0;
    }
    void wait_long(int other, unsigned phase);
    static void pause();

    std::vector<Arrival> arrivals_;
};

// A node of a graph, and the nodes it computes after its own in place of ggml.
struct CpuStep {
    std::unique_ptr<CpuNode> node;
    ggml_tensor * dst = nullptr;
    Barrier * barrier = nullptr;
    std::vector<const CpuStep *> then = {};
};

struct CpuNodes {
    int n_threads = 0;   // that compute the graph at most; 0: not the CPU backend's
    int max_threads = 0; // that compute a node, also of a graph that goes over two devices
    std::vector<std::unique_ptr<CpuStep>> list = {};
    std::unique_ptr<WorkShares> shares = {}; // once there is one
    std::unique_ptr<Barrier> barrier = {};   // of those that were joined

    // Called before each run of the graph.
    void begin_run();
};

// A node of shape [ne0, ne1] that reads args.
ggml_tensor * add_cpu_node(ggml_context * ctx, CpuNodes & nodes, ggml_type type, int64_t ne0,
                           int64_t ne1, const std::vector<ggml_tensor *> & args,
                           std::unique_ptr<CpuNode> node);
ggml_tensor * add_cpu_node(GraphContext & g, ggml_type type, int64_t ne0, int64_t ne1,
                           const std::vector<ggml_tensor *> & args, std::unique_ptr<CpuNode> node);
// One that changes x where it lies: dst is x.
ggml_tensor * add_cpu_node_in_place(GraphContext & g, ggml_tensor * x,
                                    std::unique_ptr<CpuNode> node);

// Lets the first of neighbouring nodes compute them all. ggml's threads wait for each other after
// every node by OpenMP's barrier, which asks the kernel each time and takes as long as a small
// node.
void join_neighbours(ggml_cgraph * graph, CpuNodes & nodes);

} // namespace dfl
