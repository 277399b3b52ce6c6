#include "layers/device_ops.h"

#include "cuda/custom_op.h"

#include <cstring>

namespace dfl {

using cuda::CustomOp;
using cuda::CustomOpParams;

// Replaces a function for the CPU, which such a node never has.
static void no_cpu_code(ggml_tensor *, int, int, void *) {
    GGML_ABORT("a node for the GPU ran on the CPU");
}

static ggml_tensor * tagged(ggml_tensor * node, const Hparams & hp, CustomOp op) {
    const CustomOpParams params = {op, static_cast<int32_t>(hp.recurrent.n_k_heads), hp.eps};
    static_assert(cuda::CUSTOM_OP_OFFSET + sizeof(params) <= GGML_MAX_OP_PARAMS);
    std::memcpy(reinterpret_cast<char *>(node->op_params) + cuda::CUSTOM_OP_OFFSET, &params,
                sizeof(params));
    return node;
}

static ggml_tensor * custom_node(ggml_context * ctx, const Hparams & hp, CustomOp op,
                                 const int64_t (&ne)[4], std::vector<ggml_tensor *> sources) {
    return tagged(ggml_custom_4d(ctx, GGML_TYPE_F32, ne[0], ne[1], ne[2], ne[3], sources.data(),
                                 static_cast<int>(sources.size()), no_cpu_code, 1, nullptr),
                  hp, op);
}

bool is_device_op(const ggml_tensor * node) {
    return cuda::custom_op_params(node).op != CustomOp::NONE;
}

bool runs_device_ops(const Backend & backend, const Hparams & hp, int64_t max_nodes) {
    const RecurrentShape & shape = hp.recurrent;
    const int64_t n = max_nodes, channels = shape.conv_channels();
    ggml_context_ptr ctx(ggml_init({24 * ggml_tensor_overhead(), nullptr, true}));
    const auto f32 = [&](int64_t ne0, int64_t ne1) {
        return ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, ne0, ne1);
    };
    ggml_tensor * ids = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, n);
    ggml_tensor * rows = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I64, n);
    ggml_tensor * gates = f32(shape.n_v_heads, n);
    ggml_tensor * heads =
        custom_node(ctx.get(), hp, CustomOp::DELTA_CONVOLVE, {channels, n, 1, 1},
                    {f32(channels, shape.d_conv - 1), f32(channels, n), f32(shape.d_conv, channels),
                     ids, ids, f32(channels, n), rows});
    ggml_tensor * out =
        custom_node(ctx.get(), hp, CustomOp::DELTA_TREE, {shape.d_state, shape.n_v_heads, n, 1},
                    {f32(shape.state_size(), 1), heads, gates, gates, ids, ids,
                     f32(shape.node_update_size(), n), rows});
    return backend.is_cuda() && backend.runs(heads) && backend.runs(out);
}

// Views layer `index` of a recurrent cache tensor, [ne0, ne1].
static ggml_tensor * layer_of(GraphContext & g, ggml_tensor * cache, int64_t index) {
    return ggml_view_2d(g.ctx, cache, cache->ne[0], cache->ne[1], cache->nb[1],
                        index * cache->nb[2]);
}

ggml_tensor * convolve_on_device(GraphContext & g, int il, ggml_tensor * u) {
    const RecurrentPart & part = g.recurrent.part_of(il);
    const RecurrentBatchShape & lanes = g.shape.recurrent[g.batch_index];
    const RecurrentInputs & in = g.in.recurrent[g.batch_index];
    const int64_t index = g.recurrent.index(il);
    return custom_node(
        g.ctx, g.hp, CustomOp::DELTA_CONVOLVE, {u->ne[0], lanes.n_rows, lanes.n_lanes, 1},
        {layer_of(g, part.conv, index), u, g.weights.layers[il].delta.conv, in.inputs, in.conv_taps,
         layer_of(g, part.conv_updates, index), in.conv_update_rows});
}

ggml_tensor * delta_tree_on_device(GraphContext & g, int il, ggml_tensor * heads,
                                   ggml_tensor * log_decay, ggml_tensor * beta) {
    const RecurrentPart & part = g.recurrent.part_of(il);
    const RecurrentBatchShape & lanes = g.shape.recurrent[g.batch_index];
    const RecurrentInputs & in = g.in.recurrent[g.batch_index];
    const int64_t index = g.recurrent.index(il);
    std::vector<ggml_tensor *> sources = {layer_of(g, part.state, index),
                                          heads,
                                          log_decay,
                                          beta,
                                          in.parents,
                                          in.counts,
                                          layer_of(g, part.node_updates, index),
                                          in.update_rows};
    if (in.slots != nullptr) {
        sources.push_back(in.slots);
    }
    return custom_node(
        g.ctx, g.hp, CustomOp::DELTA_TREE,
        {g.hp.recurrent.d_state, g.hp.recurrent.n_v_heads, lanes.n_rows, lanes.n_lanes},
        std::move(sources));
}

void promote_on_device(GraphContext & g, const RecurrentPart & part, const PromoteInputs & in) {
    std::vector<ggml_tensor *> sources = {part.node_updates, in.path,           in.counts,
                                          part.conv,         part.conv_updates, in.conv_rows};
    if (ggml_tensor * slots = g.in.recurrent[0].slots) {
        sources.push_back(slots);
    }
    ggml_tensor * node =
        ggml_custom_inplace(g.ctx, part.state, sources.data(), static_cast<int>(sources.size()),
                            no_cpu_code, 1, nullptr);
    ggml_build_forward_expand(g.graph, tagged(node, g.hp, CustomOp::DELTA_PROMOTE));
}

} // namespace dfl
