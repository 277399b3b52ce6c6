#include "layers/cpu_ops/cpu_node.h"

#include "layers/cpu_ops/graph_context.h"

#include <chrono>
#include <thread>
#include <unordered_map>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dfl {

void Barrier::pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

void Barrier::wait_long(int other, unsigned phase) {
    const auto began = std::chrono::steady_clock::now();
    while (!has_arrived(other, phase)) {
        // Yields, since the late thread may be waiting for the core that this thread occupies.
        std::this_thread::yield();
    }
    const auto waited = std::chrono::steady_clock::now() - began;
    arrivals_[other].waited_for_ns.fetch_add(std::chrono::nanoseconds(waited).count(),
                                             std::memory_order_relaxed);
}

void Barrier::begin_run() {
    for (Arrival & arrival : arrivals_) {
        arrival.phase.store(0, std::memory_order_relaxed);
        arrival.waited_for_ns.store(0, std::memory_order_relaxed);
    }
}

Barrier::Waits Barrier::waits(int nth) const {
    constexpr int64_t late_ns = 300000; // a preempted thread is late by at least 1 ms
    Waits waits;
    for (const Arrival & arrival : arrivals_) {
        const int64_t ns =
            arrival.waited_for_ns.load(std::memory_order_relaxed) / std::max(1, nth - 1);
        if (ns >= late_ns) {
            waits.lost_ns += ns;
            ++waits.n_late;
        }
    }
    return waits;
}

void CpuNodes::begin_run() {
    if (shares) {
        shares->begin_run();
    }
    if (barrier) {
        barrier->begin_run();
    }
}

static void run(ggml_tensor * dst, int ith, int nth, void * data) {
    const auto * step = static_cast<const CpuStep *>(data);
    step->node->compute(dst, ith, nth);
    for (const CpuStep * next : step->then) {
        step->barrier->wait(ith, nth);
        next->node->compute(next->dst, ith, nth);
    }
}

// Registers a CPU node. make: creates the ggml tensor whose computation runs the node.
template <class Make>
static ggml_tensor * add_step(CpuNodes & nodes, std::unique_ptr<CpuNode> node, Make && make) {
    auto step = std::make_unique<CpuStep>();
    ggml_tensor * tensor = make(step.get());
    if (!nodes.shares) {
        nodes.shares = std::make_unique<WorkShares>(nodes.max_threads);
    }
    node->use(*nodes.shares);
    step->node = std::move(node);
    step->dst = tensor;
    nodes.list.push_back(std::move(step));
    return tensor;
}

ggml_tensor * add_cpu_node(ggml_context * ctx, CpuNodes & nodes, ggml_type type, int64_t ne0,
                           int64_t ne1, const std::vector<ggml_tensor *> & args,
                           std::unique_ptr<CpuNode> node) {
    std::vector<ggml_tensor *> list = args;
    return add_step(nodes, std::move(node), [&](CpuStep * step) {
        return ggml_custom_4d(ctx, type, ne0, ne1, 1, 1, list.data(), static_cast<int>(list.size()),
                              run, GGML_N_TASKS_MAX, step);
    });
}

ggml_tensor * add_cpu_node_in_place(GraphContext & g, ggml_tensor * x,
                                    std::unique_ptr<CpuNode> node) {
    return add_step(g.cpu_nodes, std::move(node), [&](CpuStep * step) {
        return ggml_custom_inplace(g.ctx, x, nullptr, 0, run, GGML_N_TASKS_MAX, step);
    });
}

ggml_tensor * add_cpu_node(GraphContext & g, ggml_type type, int64_t ne0, int64_t ne1,
                           const std::vector<ggml_tensor *> & args, std::unique_ptr<CpuNode> node) {
    return add_cpu_node(g.ctx, g.cpu_nodes, type, ne0, ne1, args, std::move(node));
}

static bool computes_nothing(const ggml_tensor * node) {
    return node->op == GGML_OP_NONE || node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE ||
           node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE;
}

void join_neighbours(ggml_cgraph * graph, CpuNodes & nodes) {
    nodes.barrier = std::make_unique<Barrier>(nodes.n_threads);
    std::unordered_map<const ggml_tensor *, CpuStep *> steps;
    for (const auto & step : nodes.list) {
        steps[step->dst] = step.get();
        step->barrier = nodes.barrier.get();
    }
    CpuStep * first = nullptr;
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (computes_nothing(node)) {
            continue;
        }
        const auto step = steps.find(node);
        if (step == steps.end()) {
            first = nullptr;
        } else if (first == nullptr) {
            first = step->second;
        } else {
            first->then.push_back(step->second);
            node->flags &= ~GGML_TENSOR_FLAG_COMPUTE;
        }
    }
}

} // namespace dfl
