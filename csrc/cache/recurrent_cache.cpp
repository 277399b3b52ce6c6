#include "cache/recurrent_cache.h"

#include <algorithm>

namespace dfl {

RecurrentCache::RecurrentCache(const Hparams & hp, const LayerPlace & place, int64_t n_sequences)
    : shape_(hp.recurrent), n_sequences_(n_sequences), part_(hp.n_layer(), nullptr),
      index_(hp.n_layer(), -1) {
    for (int64_t il = 0; il < hp.n_layer(); ++il) {
        if (!hp.layers[il].recurrent) {
            continue;
        }
        Backend & backend = place(il);
        auto part = std::find_if(parts_.begin(), parts_.end(),
                                 [&](const auto & part) { return part->backend == &backend; });
        if (part == parts_.end()) {
            part = parts_.insert(part, std::make_unique<RecurrentPart>());
            (*part)->backend = &backend;
        }
        part_[il] = part->get();
        index_[il] = (*part)->n_layers++;
    }
    for (const auto & part : parts_) {
        part->ctx.reset(ggml_init({2 * ggml_tensor_overhead(), nullptr, true}));
        ggml_context * ctx = part->ctx.get();
        part->state = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, shape_.state_size(), n_sequences,
                                         part->n_layers);
        part->conv =
            ggml_new_tensor_3d(ctx, GGML_TYPE_F32, shape_.conv_channels() * (shape_.d_conv - 1),
                               n_sequences, part->n_layers);
        part->memory = part->backend->allocate(ctx, "the recurrent state");
    }
}

void RecurrentCache::reserve_updates(int64_t n, bool pads) {
    std::vector<RecurrentPart> fresh(parts_.size());
    for (size_t i = 0; i < parts_.size(); ++i) {
        RecurrentPart & to = fresh[i];
        to.updates_ctx.reset(ggml_init({2 * ggml_tensor_overhead(), nullptr, true}));
        ggml_context * ctx = to.updates_ctx.get();
        const int64_t layers = parts_[i]->n_layers;
        to.n_update_rows = n;
        to.n_conv_update_rows = n_sequences_ * (shape_.d_conv - 1) + n;
        to.node_updates = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, shape_.node_update_size(),
                                             pads ? to.zero_row() + 1 : n, layers);
        to.conv_updates = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, shape_.conv_channels(),
                                             to.n_conv_update_rows + (pads ? 1 : 0), layers);
        to.updates_memory = parts_[i]->backend->allocate(ctx, "the node updates of a verify");
    }
    for (size_t i = 0; i < parts_.size(); ++i) {
        parts_[i]->updates_memory = std::move(fresh[i].updates_memory);
        parts_[i]->updates_ctx = std::move(fresh[i].updates_ctx);
        parts_[i]->node_updates = fresh[i].node_updates;
        parts_[i]->conv_updates = fresh[i].conv_updates;
        parts_[i]->n_update_rows = fresh[i].n_update_rows;
        parts_[i]->n_conv_update_rows = fresh[i].n_conv_update_rows;
    }
}

uint64_t RecurrentCache::bytes(const Backend * on) const {
    uint64_t sum = 0;
    for (const auto & part : parts_) {
        sum += on == nullptr || part->backend == on ? part->memory.bytes : 0;
    }
    return sum;
}

uint64_t RecurrentCache::sequence_bytes() const {
    uint64_t sum = 0;
    for (const auto & part : parts_) {
        sum += part->n_layers * (part->state->nb[1] + part->conv->nb[1]);
    }
    return sum;
}

uint64_t RecurrentCache::update_bytes(const Backend * on) const {
    uint64_t sum = 0;
    for (const auto & part : parts_) {
        sum += on == nullptr || part->backend == on ? part->updates_memory.bytes : 0;
    }
    return sum;
}

// Calls visit(part, tensor, offset, size) with the bytes of a sequence's slot in every tensor.
// part: the tensors of one device.
template <typename Visit>
void RecurrentCache::for_each_part(int32_t sequence, Visit && visit) const {
    for (const bool is_state : {true, false}) {
        for (const auto & part : parts_) {
            ggml_tensor * tensor = is_state ? part->state : part->conv;
            visit(*part, tensor, sequence * tensor->nb[1], tensor->nb[1]);
        }
    }
}

void RecurrentCache::clear(int32_t sequence) {
    for_each_part(
        sequence, [](const RecurrentPart & part, ggml_tensor * tensor, size_t offset, size_t size) {
            for (int64_t layer = 0; layer < part.n_layers; ++layer) {
                ggml_backend_tensor_memset(tensor, 0, offset + layer * tensor->nb[2], size);
            }
        });
}

RawBytes RecurrentCache::save(int32_t sequence) const {
    RawBytes bytes(sequence_bytes());
    size_t at = 0;
    for_each_part(sequence, [&](const RecurrentPart & part, ggml_tensor * tensor, size_t offset,
                                size_t size) {
        part.backend->read_rows(tensor, bytes.data() + at, offset, size, part.n_layers,
                                tensor->nb[2]);
        at += size * part.n_layers;
    });
    return bytes;
}

void RecurrentCache::load(int32_t sequence, const RawBytes & bytes) {
    size_t at = 0;
    for_each_part(sequence, [&](const RecurrentPart & part, ggml_tensor * tensor, size_t offset,
                                size_t size) {
        ggml_backend_tensor_set_2d(tensor, bytes.data() + at, offset, size, part.n_layers,
                                   tensor->nb[2], size);
        at += size * part.n_layers;
    });
}

} // namespace dfl
