// libcudart.so: graphs. A graph is what its streams captured, in order.
#include "api.h"
#include "streams.h"

#include <cuda_runtime_api.h>

#include <memory>

using namespace soft_gpu;

namespace {

using Executable = std::shared_ptr<const Graph>; // kept by launches that have not run yet

Executable & executable(cudaGraphExec_t handle) { return *reinterpret_cast<Executable *>(handle); }
Graph & graph(cudaGraph_t handle) { return *reinterpret_cast<Graph *>(handle); }

bool has_same_nodes(const Graph & one, const Graph & other) {
    bool is_same = one.size() == other.size();
    for (size_t i = 0; is_same && i < one.size(); ++i) {
        is_same = one[i].kind == other[i].kind;
    }
    return is_same;
}

} // namespace

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    begin_capture(stream);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t * captured) {
    *captured = reinterpret_cast<cudaGraph_t>(new Graph(end_capture(stream)));
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus * status) {
    *status = is_capturing(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t * made, cudaGraph_t from,
                                        unsigned long long) {
    *made = reinterpret_cast<cudaGraphExec_t>(
        new Executable(std::make_shared<const Graph>(graph(from))));
    return cudaSuccess;
}

// Refuses other nodes, as a real GPU does; their parameters may differ.
EXPORT cudaError_t cudaGraphExecUpdate(cudaGraphExec_t old, cudaGraph_t from,
                                       cudaGraphExecUpdateResultInfo * info) {
    *info = {};
    ++counts().graph_updates;
    if (!has_same_nodes(*executable(old), graph(from))) {
        ++counts().failed_updates;
        info->result = cudaGraphExecUpdateErrorTopologyChanged;
        return cudaErrorGraphExecUpdateFailure;
    }
    executable(old) = std::make_shared<const Graph>(graph(from));
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream) {
    const Executable launched = executable(handle);
    ++counts().graph_launches;
    counts().replayed_nodes += static_cast<int64_t>(launched->size());
    enqueue(stream, {"graph", [launched] {
                         for (const Work & work : *launched) {
                             work.run();
                         }
                     }});
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
    delete &graph(handle);
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
    delete &executable(handle);
    return cudaSuccess;
}
