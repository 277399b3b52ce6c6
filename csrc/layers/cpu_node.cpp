#include "layers/cpu_node.h"

#include "layers/build.h"

namespace dfl {

static void run(ggml_tensor * dst, int ith, int nth, void * node) {
    static_cast<CpuNode *>(node)->compute(dst, ith, nth);
}

ggml_tensor * add_cpu_node(Build & b, ggml_type type, int64_t ne0, int64_t ne1,
                           const std::vector<ggml_tensor *> & args, std::unique_ptr<CpuNode> node) {
    std::vector<ggml_tensor *> list = args; // ggml takes them as not const
    ggml_tensor * tensor =
        ggml_custom_4d(b.ctx, type, ne0, ne1, 1, 1, list.data(), static_cast<int>(list.size()), run,
                       GGML_N_TASKS_MAX, node.get());
    b.cpu_nodes.list.push_back(std::move(node));
    return tensor;
}

} // namespace dfl
