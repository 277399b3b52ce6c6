// Graph nodes computed by our own code, on the CPU backend only.
#pragma once

#include <algorithm>
#include <atomic>
#include <ggml.h>
#include <memory>
#include <vector>

namespace dfl {

struct GraphContext;
struct PackedMatrix;

// Distributes the parts of each node's work over the threads of a run. All threads take part in
// every node, and no thread begins a node before all have finished the previous node.
class WorkShares {
  public:
    explicit WorkShares(int n_threads) : own_(n_threads) {}

    // Calls body(i) for thread ith's share of the work items i in [0, n) of a node, the same in
    // every run. If `is_long`, threads that have finished take over items of slower threads.
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
        // Clears the counter that the next node will use for the work items taken from this thread.
        own_[ith].taken[1 - turn].store(0, std::memory_order_relaxed);
        for (int i = 0; i < nth; ++i) {
            const int64_t of = (ith + i) % nth, first = n * of / nth, end = n * (of + 1) / nth;
            std::atomic<int64_t> & taken = own_[of].taken[turn];
            for (int64_t part;
                 (part = first + taken.fetch_add(1, std::memory_order_relaxed)) < end;) {
                body(part);
            }
        }
    }

    void begin_run() {
        for (Own & own : own_) {
            own.turn = 0;
            own.taken[0].store(0, std::memory_order_relaxed);
        }
    }

  private:
    struct alignas(128) Own { // cores fetch cache lines in pairs: 128 bytes avoid false sharing
        std::atomic<int64_t> taken[2] = {}; // work items taken in this node, and in the next
        int turn = 0;
    };

    std::vector<Own> own_;
};

// Work of one graph node, owned by the graph.
class CpuNode {
  public:
    virtual ~CpuNode() = default;
    // Computes thread ith's share of dst. All nth threads call compute() at once and return before
    // the next node begins. nth <= CpuNodes::max_threads may change between runs. Must not throw.
    virtual void compute(ggml_tensor * dst, int ith, int nth) = 0;
    virtual std::vector<const PackedMatrix *> weights() const { return {}; }

    void use(WorkShares & shares) { shares_ = &shares; }

  protected:
    // Calls body(i) for thread ith's work items in [0, n). All threads call share_out() once a run.
    template <class Body>
    void share_out(int64_t n, bool is_long, int ith, int nth, Body && body) {
        shares_->share_out(n, is_long, ith, nth, body);
    }

  private:
    WorkShares * shares_ = nullptr;
};

// Barrier for the threads of a graph, which spin, as they meet every few microseconds. A thread
// signals in its own cache line: moving a line between cores takes longer than a small node.
class Barrier {
  public:
    explicit Barrier(int n_threads) : arrivals_(n_threads) {}

    // Waits until all nth threads have called wait(); nth is at most the constructor's n_threads.
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

    void begin_run();

    // Time that a run lost to late threads. A thread is late if it had to wait for a core.
    struct Waits {
        int64_t lost_ns = 0;
        int n_late = 0;
    };
    Waits waits(int nth) const;

  private:
    struct alignas(128) Arrival {
        std::atomic<unsigned> phase{0};
        std::atomic<int64_t> waited_for_ns{0}; // time that other threads waited for this thread
    };

    // Polls before a waiting thread reads the clock, about 20 us. A running thread arrives sooner.
    static constexpr int SHORT_WAIT = 1000;

    bool has_arrived(int other, unsigned phase) const {
        return static_cast<int>(arrivals_[other].phase.load(std::memory_order_acquire) - phase) >=
               0;
    }
    void wait_long(int other, unsigned phase);
    static void pause();

    std::vector<Arrival> arrivals_;
};

// A CPU node, and the adjacent CPU nodes (`then`) that its threads compute in the same call.
struct CpuStep {
    std::unique_ptr<CpuNode> node;
    ggml_tensor * dst = nullptr;
    Barrier * barrier = nullptr;
    std::vector<const CpuStep *> then = {};
};

struct CpuNodes {
    int n_threads = 0; // most threads of a graph on the CPU alone; 0: the graph uses another device
    int max_threads = 0; // most threads of a node, also in a graph split over two devices
    std::vector<std::unique_ptr<CpuStep>> list = {};
    std::unique_ptr<WorkShares> shares = {};
    std::unique_ptr<Barrier> barrier = {};

    // Resets shares and barrier. One thread calls begin_run() before each run of the graph.
    void begin_run();
};

// Adds a tensor of shape [ne0, ne1] that a CPU node computes from args.
ggml_tensor * add_cpu_node(ggml_context * ctx, CpuNodes & nodes, ggml_type type, int64_t ne0,
                           int64_t ne1, const std::vector<ggml_tensor *> & args,
                           std::unique_ptr<CpuNode> node);
ggml_tensor * add_cpu_node(GraphContext & g, ggml_type type, int64_t ne0, int64_t ne1,
                           const std::vector<ggml_tensor *> & args, std::unique_ptr<CpuNode> node);
// Adds a CPU node that changes x in place: its dst shares the memory of x.
ggml_tensor * add_cpu_node_in_place(GraphContext & g, ggml_tensor * x,
                                    std::unique_ptr<CpuNode> node);

// Makes the first of adjacent CPU nodes compute all of them: ggml's OpenMP barrier after each node
// makes a system call and takes as long as a small node.
void join_neighbours(ggml_cgraph * graph, CpuNodes & nodes);

} // namespace dfl
