#include "graph.h"

#include "error.h"

#include <algorithm>

namespace dfl {

// Decode, a few verify sizes and the last prefill shapes; older ones are rebuilt when wanted.
static constexpr size_t MAX_LIVE = 16;

GraphPool::GraphPool(const Model & model, Backend & backend, const KvCache & kv,
                     const RecurrentCache & recurrent)
    : model_(model), backend_(backend), kv_(kv), recurrent_(recurrent),
      arena_(ggml_gallocr_new(backend.default_buffer_type())) {}

uint64_t GraphPool::arena_bytes() const { return ggml_gallocr_get_buffer_size(arena_.get(), 0); }

static ggml_tensor * input(ggml_context * ctx, ggml_type type, int64_t ne0, int64_t ne1,
                           const char * name) {
    ggml_tensor * tensor = ggml_new_tensor_2d(ctx, type, ne0, ne1);
    ggml_set_input(tensor);
    ggml_set_name(tensor, name);
    return tensor;
}

static bool is_multi_rope(int type) { return (type & GGML_ROPE_TYPE_MROPE) != 0; }

static GraphInputs make_inputs(ggml_context * ctx, const Hparams & hp, const BatchShape & shape) {
    GraphInputs in;
    in.embd = input(ctx, GGML_TYPE_F32, hp.n_embd, shape.n_rows, "embd");
    bool attends = false;
    for (const LayerShape & layer : hp.layers) {
        if (layer.recurrent) {
            continue;
        }
        if (!attends) {
            attends = true;
            const int64_t n = is_multi_rope(layer.rope.type) ? 4 * shape.n_rows : shape.n_rows;
            in.positions = input(ctx, GGML_TYPE_I32, n, 1, "positions");
            in.cells = input(ctx, GGML_TYPE_I64, shape.n_rows, 1, "cells");
        }
        const bool known = std::any_of(in.masks.begin(), in.masks.end(), [&](const Mask & mask) {
            return mask.window == layer.window;
        });
        if (!known) {
            in.masks.push_back(
                {layer.window, input(ctx, GGML_TYPE_F16, shape.n_kv, shape.n_rows, "mask")});
        }
    }
    if (shape.n_out > 0 && shape.n_out < shape.n_rows) {
        in.out_rows = input(ctx, GGML_TYPE_I32, shape.n_out, 1, "out_rows");
    }
    return in;
}

LiveGraph GraphPool::build(const BatchShape & shape) const {
    const Hparams & hp = model_.hparams();
    const size_t n_nodes = 256 + hp.n_layer() * (64 + 2 * hp.experts.n_used);
    LiveGraph live;
    live.shape = shape;
    // Views and leaves count as tensors too, though not as nodes.
    live.ctx.reset(ggml_init(
        {4 * n_nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(2 * n_nodes, false),
         nullptr, true}));
    live.graph = ggml_new_graph_custom(live.ctx.get(), 2 * n_nodes, false);
    live.in = make_inputs(live.ctx.get(), hp, shape);
    Build build = {live.ctx.get(), live.graph, hp,     model_.weights(), kv_,
                   recurrent_,     shape,      live.in};
    live.logits = model_.arch().build(build);
    if (live.logits != nullptr) {
        ggml_set_output(live.logits);
        if (!backend_.is_host()) {
            live.argmax = ggml_argmax(live.ctx.get(), live.logits);
            ggml_set_output(live.argmax);
            ggml_build_forward_expand(live.graph, live.argmax);
        }
    }
    return live;
}

LiveGraph & GraphPool::get(const BatchShape & shape) {
    for (auto it = live_.begin(); it != live_.end(); ++it) {
        if (it->shape == shape) {
            live_.splice(live_.begin(), live_, it);
            return live_.front();
        }
    }
    LiveGraph fresh = build(shape);
    const uint64_t before = arena_bytes();
    const bool allocated = ggml_gallocr_alloc_graph(arena_.get(), fresh.graph);
    if (!allocated || arena_bytes() != before) {
        live_.clear(); // they point into the arena that was just replaced
    }
    DFL_CHECK(allocated, DFL_STATUS_MEMORY,
              "device %s cannot allocate the compute buffer of %lld rows over %lld cells",
              backend_.name(), (long long)shape.n_rows, (long long)shape.n_kv);
    ++n_built_;
    live_.push_front(std::move(fresh));
    if (live_.size() > MAX_LIVE) {
        live_.pop_back();
    }
    return live_.front();
}

} // namespace dfl
