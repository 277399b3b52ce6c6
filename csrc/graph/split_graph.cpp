#include "graph/split_graph.h"

#include "error.h"
#include "layers/device_ops.h"

#include <algorithm>
#include <unordered_set>

namespace dfl {

ArenaBytes max_of(const ArenaBytes & a, const ArenaBytes & b) {
    return {std::max(a.main, b.main), std::max(a.cpu_split, b.cpu_split)};
}

// True if a node uses a tensor in the CPU's part of a split model.
static bool is_on_cpu_split(const Backend & backend, const ggml_tensor * node) {
    auto elsewhere = [&](const ggml_tensor * tensor) {
        const ggml_tensor * owner = tensor->view_src != nullptr ? tensor->view_src : tensor;
        return owner->buffer != nullptr &&
               !ggml_backend_supports_buft(backend.get(),
                                           ggml_backend_buffer_get_type(owner->buffer));
    };
    return elsewhere(node) ||
           std::any_of(node->src, node->src + GGML_MAX_SRC,
                       [&](const ggml_tensor * src) { return src != nullptr && elsewhere(src); });
}

// True for a node that runs our own CPU code; its weights are not tensors of the graph.
static bool is_cpu_node(const ggml_tensor * node) {
    return node->op == GGML_OP_CUSTOM && !is_device_op(node);
}

std::set<std::string> unsupported_operations(const Backend & backend, ggml_cgraph * graph) {
    std::set<std::string> lacking;
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (is_cpu_node(node) || backend.runs(node) || is_on_cpu_split(backend, node)) {
            continue;
        }
        const bool writes_cache = node->view_src != nullptr && node->view_src->buffer != nullptr;
        DFL_CHECK(!writes_cache, DFL_STATUS_UNSUPPORTED,
                  "device %s cannot write to its caches: it lacks %s", backend.name(),
                  ggml_op_desc(node));
        lacking.insert(ggml_op_desc(node));
    }
    return lacking;
}

bool reaches_cpu_split(const Backend & backend, ggml_cgraph * graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (is_cpu_node(node) || is_on_cpu_split(backend, node)) {
            return true;
        }
    }
    return false;
}

// Returns the number of nodes and leaves of a graph.
static size_t n_tensors(ggml_cgraph * graph) {
    std::unordered_set<const ggml_tensor *> leaves;
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        for (const ggml_tensor * source : ggml_graph_node(graph, i)->src) {
            if (source != nullptr && source->op == GGML_OP_NONE) {
                leaves.insert(source);
            }
        }
    }
    return ggml_graph_n_nodes(graph) + leaves.size();
}

void set_graph_id(Devices & devices, ggml_cgraph * graph) {
    // The split serves only to number the graph, which ggml does nowhere else.
    ggml_backend_t backends[] = {devices.main().get(), devices.cpu()->get()};
    const ggml_backend_sched_ptr scheduler(ggml_backend_sched_new(
        backends, nullptr, 2, n_tensors(graph), /*parallel =*/false, /*op_offload =*/false));
    ggml_backend_sched_split_graph(scheduler.get(), graph);
}

static ggml_backend_sched_ptr new_scheduler(Devices & devices, size_t max_nodes, bool op_offload) {
    Backend & main = devices.main();
    Backend & cpu = *devices.cpu();
    ggml_backend_t backends[] = {main.get(), cpu.get()};
    ggml_backend_buffer_type_t pinned = ggml_backend_dev_host_buffer_type(main.device());
    ggml_backend_buffer_type_t types[] = {main.default_buffer_type(),
                                          pinned != nullptr ? pinned : cpu.default_buffer_type()};
    return ggml_backend_sched_ptr(ggml_backend_sched_new(backends, types, 2, 2 * max_nodes,
                                                         /*parallel =*/false, op_offload));
}

SplitScheduler::SplitScheduler(Devices & devices, size_t max_nodes)
    : devices_(devices), max_nodes_(max_nodes),
      scheduler_(new_scheduler(devices, max_nodes, /*op_offload =*/true)) {}

ArenaBytes SplitScheduler::measure(ggml_cgraph * graph, bool op_offload) const {
    const ggml_backend_sched_ptr scheduler = new_scheduler(devices_, max_nodes_, op_offload);
    size_t sizes[2] = {};
    ggml_backend_sched_reserve_size(scheduler.get(), graph, sizes);
    return {sizes[0], sizes[1]};
}

bool SplitScheduler::allocate(ggml_cgraph * graph, bool op_offload) {
    // ggml may reuse the layout of the last graph with as many nodes. That is safe, as the number
    // of rows does not change the nodes of a split graph.
    ggml_backend_sched_reset(scheduler_.get());
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (is_device_op(node)) {
            ggml_backend_sched_set_tensor_backend(scheduler_.get(), node, devices_.main().get());
        } else if (!op_offload && is_on_cpu_split(devices_.main(), node)) {
            ggml_backend_sched_set_tensor_backend(scheduler_.get(), node, devices_.cpu()->get());
        }
    }
    return ggml_backend_sched_alloc_graph(scheduler_.get(), graph);
}

void SplitScheduler::compute(ggml_cgraph * graph) {
    devices_.main().compute(
        [&] { return ggml_backend_sched_graph_compute_async(scheduler_.get(), graph); },
        [&] { ggml_backend_sched_synchronize(scheduler_.get()); });
}

ArenaBytes SplitScheduler::bytes() const {
    return {ggml_backend_sched_get_buffer_size(scheduler_.get(), devices_.main().get()),
            ggml_backend_sched_get_buffer_size(scheduler_.get(), devices_.cpu()->get())};
}

} // namespace dfl
