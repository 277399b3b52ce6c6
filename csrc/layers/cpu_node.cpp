#include "layers/cpu_node.h"

#include "layers/build.h"

#include <thread>
#include <unordered_map>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dfl {

void Barrier::look_again() {
    // About a millisecond of looking in all before the core is offered to others.
    thread_local int looks = 0;
    constexpr int patience = 20000;
    if (++looks < patience) {
#if defined(__x86_64__)
        _mm_pause();
#endif
        return;
    }
    looks = 0;
    std::this_thread::yield();
}

static void run(ggml_tensor * dst, int ith, int nth, void * data) {
    const auto * step = static_cast<const CpuStep *>(data);
    step->node->compute(dst, ith, nth);
    for (const CpuStep * next : step->then) {
        step->barrier->wait(ith, nth);
        next->node->compute(next->dst, ith, nth);
    }
}

ggml_tensor * add_cpu_node(ggml_context * ctx, CpuNodes & nodes, ggml_type type, int64_t ne0,
                           int64_t ne1, const std::vector<ggml_tensor *> & args,
                           std::unique_ptr<CpuNode> node) {
    std::vector<ggml_tensor *> list = args; // ggml takes them as not const
    auto step = std::make_unique<CpuStep>();
    ggml_tensor * tensor =
        ggml_custom_4d(ctx, type, ne0, ne1, 1, 1, list.data(), static_cast<int>(list.size()), run,
                       GGML_N_TASKS_MAX, step.get());
    step->node = std::move(node);
    step->dst = tensor;
    nodes.list.push_back(std::move(step));
    return tensor;
}

ggml_tensor * add_cpu_node(Build & b, ggml_type type, int64_t ne0, int64_t ne1,
                           const std::vector<ggml_tensor *> & args, std::unique_ptr<CpuNode> node) {
    return add_cpu_node(b.ctx, b.cpu_nodes, type, ne0, ne1, args, std::move(node));
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
    CpuStep * first = nullptr; // of the neighbours passed
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (computes_nothing(node)) {
            continue;
        }
        const auto found = steps.find(node);
        if (found == steps.end()) {
            first = nullptr;
        } else if (first == nullptr) {
            first = found->second;
        } else {
            first->then.push_back(found->second);
            node->flags &= ~GGML_TENSOR_FLAG_COMPUTE;
        }
    }
}

} // namespace dfl
