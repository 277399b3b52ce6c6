#include "cache/cache.h"

#include "cpu/row_kernel.h"
#include "error.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace dfl {

// Whether the device can attend one head shape with this pair of types, and write both.
static bool pair_works(Backend & backend, const LayerShape & layer, ggml_type type_k,
                       ggml_type type_v) {
    constexpr int64_t n_kv = 256, n_rows = 2;
    ggml_context_ptr ctx(ggml_init({16 * ggml_tensor_overhead(), nullptr, true}));
    ggml_context * c = ctx.get();
    ggml_tensor * q = ggml_new_tensor_3d(c, GGML_TYPE_F32, layer.head_dim, n_rows, layer.n_head);
    ggml_tensor * k = ggml_new_tensor_3d(c, type_k, layer.head_dim, n_kv, layer.n_head_kv);
    ggml_tensor * v = ggml_new_tensor_3d(c, type_v, layer.head_dim, n_kv, layer.n_head_kv);
    ggml_tensor * mask = ggml_new_tensor_2d(c, GGML_TYPE_F16, n_kv, n_rows);
    ggml_tensor * attended = ggml_flash_attn_ext(c, q, k, v, mask, 1.0f, 0.0f, 0.0f);
    if (!backend.runs(attended)) {
        return false;
    }
    for (ggml_type type : {type_k, type_v}) {
        ggml_tensor * rows = ggml_new_tensor_2d(c, type, layer.head_dim * layer.n_head_kv, n_kv);
        ggml_tensor * from = ggml_new_tensor_2d(c, GGML_TYPE_F32, rows->ne[0], n_rows);
        ggml_tensor * ids = ggml_new_tensor_1d(c, GGML_TYPE_I64, n_rows);
        if (!backend.runs(ggml_set_rows(c, rows, from, ids))) {
            return false;
        }
    }
    return true;
}

static const ggml_type CACHE_TYPES[] = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16,
                                        GGML_TYPE_Q8_0, GGML_TYPE_Q5_1, GGML_TYPE_Q5_0,
                                        GGML_TYPE_Q4_1, GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL};

static void check_types(Backend & backend, const LayerShape & layer, ggml_type type_k,
                        ggml_type type_v) {
    auto fits = [&](ggml_type k, ggml_type v) {
        const auto listed = [](ggml_type type) {
            return std::find(std::begin(CACHE_TYPES), std::end(CACHE_TYPES), type) !=
                   std::end(CACHE_TYPES);
        };
        return listed(k) && listed(v) && layer.head_dim % ggml_blck_size(k) == 0 &&
               layer.head_dim % ggml_blck_size(v) == 0 && pair_works(backend, layer, k, v);
    };
    if (fits(type_k, type_v)) {
        return;
    }
    std::string valid;
    for (ggml_type k : CACHE_TYPES) {
        for (ggml_type v : CACHE_TYPES) {
            if (fits(k, v)) {
                valid += (valid.empty() ? "" : ", ") + std::string(ggml_type_name(k)) + "/" +
                         ggml_type_name(v);
            }
        }
    }
    const std::string advice = valid.empty()
                                   ? "no others do: leave the layers on the CPU (n_gpu_layers 0)"
                                   : "valid (K/V): " + valid;
    throw Error(DFL_STATUS_UNSUPPORTED,
                format("cache types %s/%s do not work on %s with heads of %lld values; %s",
                       ggml_type_name(type_k), ggml_type_name(type_v), backend.name(),
                       (long long)layer.head_dim, advice.c_str()));
}

// Orthonormal Walsh-Hadamard matrix: entry (i, j) is the sign of popcount(i & j).
static void set_hadamard(ggml_tensor * matrix) {
    const int64_t n = matrix->ne[0];
    const float unit = 1.0f / std::sqrt(static_cast<float>(n));
    std::vector<float> values(n * n);
    for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j < n; ++j) {
            values[i * n + j] = __builtin_parityll(i & j) ? -unit : unit;
        }
    }
    ggml_backend_tensor_set(matrix, values.data(), 0, ggml_nbytes(matrix));
}

// Layers that attend by ggml's operation.
static std::vector<bool> masked_layers(const Hparams & hp, const LayerPlace & place) {
    std::vector<bool> masked;
    for (int64_t il = 0; il < hp.n_layer(); ++il) {
        const LayerShape & layer = hp.layers[il];
        const bool on_host = place(il).runs_cpu_nodes() &&
                             (layer.kv_layer < 0 || place(layer.kv_layer).runs_cpu_nodes());
        const bool own = !layer.recurrent && on_host && layer.head_dim <= cpu::MAX_TURNED_HEAD;
        masked.push_back(!layer.recurrent && !own);
    }
    return masked;
}

static std::vector<int64_t> indices(const std::vector<bool> & set) {
    std::vector<int64_t> found;
    for (size_t i = 0; i < set.size(); ++i) {
        if (set[i]) {
            found.push_back(static_cast<int64_t>(i));
        }
    }
    return found;
}

KvCache::KvCache(const Hparams & hp, const LayerPlace & place, ggml_type type_k, ggml_type type_v,
                 int64_t n_cells, int64_t n_rows, int32_t n_sequences)
    : part_(hp.n_layer(), nullptr), k_(hp.n_layer(), nullptr), v_(hp.n_layer(), nullptr),
      cells_(n_cells, n_sequences), has_mask_(masked_layers(hp, place)),
      masks_(hp, indices(has_mask_), place, n_cells, n_rows), n_sequences_(n_sequences) {
    // Block sizes of the rotations are those llama.cpp uses: the largest power of two that divides
    // every K head, 64 for V; none where a head is not a multiple of 64.
    int64_t block_k = ggml_is_quantized(type_k) ? int64_t(1) << 20 : 0;
    int64_t block_v = ggml_is_quantized(type_v) ? 64 : 0;
    for (int64_t il = 0; il < hp.n_layer(); ++il) {
        const LayerShape & layer = hp.layers[il];
        if (layer.recurrent) {
            continue;
        }
        if (layer.kv_layer >= 0) { // an earlier one
            part_[il] = part_[layer.kv_layer];
            k_[il] = k_[layer.kv_layer];
            v_[il] = v_[layer.kv_layer];
            attends_on_host_ = attends_on_host_ || attends_on_host(il);
            continue;
        }
        Backend & backend = place(il);
        check_types(backend, layer, type_k, type_v);
        part_[il] = &backend;
        attends_on_host_ = attends_on_host_ || attends_on_host(il);
        Part & part = parts_[&backend];
        if (!part.ctx) {
            part.ctx.reset(
                ggml_init({(2 * hp.layers.size() + 2) * ggml_tensor_overhead(), nullptr, true}));
        }
        const int64_t width = layer.head_dim * layer.n_head_kv;
        k_[il] = ggml_new_tensor_2d(part.ctx.get(), type_k, width, n_cells);
        v_[il] = ggml_new_tensor_2d(part.ctx.get(), type_v, width, n_cells);
        ggml_format_name(k_[il], "k.%lld", (long long)il);
        ggml_format_name(v_[il], "v.%lld", (long long)il);
        block_k = std::min(block_k, layer.head_dim & -layer.head_dim);
        block_v = layer.head_dim % 64 == 0 ? block_v : 0;
    }
    for (auto & [backend, part] : parts_) {
        auto rotation = [&, ctx = part.ctx.get()](int64_t block) {
            return block >= 64 ? ggml_new_tensor_2d(ctx, GGML_TYPE_F32, block, block) : nullptr;
        };
        part.rotation_k = rotation(block_k);
        part.rotation_v = rotation(block_v);
        part.memory = backend->allocate(
            part.ctx.get(), format("a K/V cache of %lld cells", (long long)n_cells).c_str());
        for (ggml_tensor * matrix : {part.rotation_k, part.rotation_v}) {
            if (matrix != nullptr && !backend->measures()) {
                set_hadamard(matrix);
            }
        }
    }
}

void KvCache::set_rows(const MaskRows & rows, int64_t n_kv) {
    if (masks_.empty()) {
        cells_.take_changes(); // nobody asks for them
    } else {
        masks_.update(cells_, rows, n_kv);
    }
    if (attends_on_host_) {
        find_seen_cells(cells_, rows, seen_);
    }
}

uint64_t KvCache::bytes() const {
    uint64_t sum = 0;
    for (const auto & [backend, part] : parts_) {
        sum += part.memory.bytes;
    }
    return sum;
}

uint64_t KvCache::bytes_on(const Backend * backend) const {
    uint64_t sum = 0;
    for (const auto & [place, part] : parts_) {
        sum += place == backend ? part.memory.bytes : 0;
    }
    return sum;
}

bool KvCache::is_host() const {
    return std::all_of(parts_.begin(), parts_.end(),
                       [](const auto & part) { return part.first->is_host(); });
}

void KvCache::copy_row(int64_t from, int64_t to) {
    if (from == to) {
        return;
    }
    for (const auto & tensors : {k_, v_}) {
        for (ggml_tensor * tensor : tensors) {
            if (tensor != nullptr) {
                auto * rows = static_cast<char *>(tensor->data);
                std::memcpy(rows + to * tensor->nb[1], rows + from * tensor->nb[1], tensor->nb[1]);
            }
        }
    }
}

void KvCache::zero(int64_t first, int64_t n) {
    for (const auto & tensors : {k_, v_}) {
        for (ggml_tensor * tensor : tensors) {
            if (tensor != nullptr && n > 0) {
                ggml_backend_tensor_memset(tensor, 0, first * tensor->nb[1], n * tensor->nb[1]);
            }
        }
    }
}

void KvCache::clear(int32_t sequence) {
    int64_t first = 0; // of cells side by side that are to be zeroed: few calls of a device
    for (int64_t cell = 0; cell <= cells_.n_touched(); ++cell) {
        const bool is_meant =
            cell < cells_.n_touched() &&
            (cells_.sequence(cell) == CellTable::FREE || cells_.sequence(cell) == sequence);
        if (!is_meant) {
            zero(first, cell - first);
            first = cell + 1;
        }
    }
    zero(cells_.size(), cells_.n_cells() - cells_.size());
}

void KvCache::clear_cell(int64_t cell) { zero(cell, 1); }

void KvCache::clear_from(int32_t sequence, int32_t position) {
    // Shared rows are others' too, and read by our own code alone.
    const auto own = static_cast<int64_t>(cells_.shared(sequence).size()) * CellTable::PAGE;
    for (const cpu::CellSpan & span : cells_.spans(sequence)) {
        const int64_t from = std::max<int64_t>(position, own);
        const int64_t first = std::clamp<int64_t>(from - span.position, 0, span.n);
        zero(span.cell + first, span.n - first);
    }
}

void KvCache::release_from(int32_t sequence, int32_t position) {
    copy_cells(cells_.release_from(sequence, position));
}

std::vector<ggml_tensor *> KvCache::tensors() const {
    std::vector<ggml_tensor *> found;
    for (const auto & of_layers : {k_, v_}) {
        for (ggml_tensor * tensor : of_layers) { // layers may share one
            if (tensor != nullptr && std::find(found.begin(), found.end(), tensor) == found.end()) {
                found.push_back(tensor);
            }
        }
    }
    return found;
}

uint64_t KvCache::row_bytes() const {
    uint64_t sum = 0;
    for (const ggml_tensor * tensor : tensors()) {
        sum += tensor->nb[1];
    }
    return sum;
}

void KvCache::read_rows(int32_t sequence, int32_t position, int64_t n, uint8_t * to) const {
    int64_t n_found = 0;
    for (const ggml_tensor * tensor : tensors()) {
        const size_t row = tensor->nb[1];
        for (const cpu::CellSpan & span : cells_.spans(sequence)) {
            const int64_t first = std::max<int64_t>(position, span.position);
            const int64_t end = std::min(position + n, span.position + span.n);
            if (first < end) {
                ggml_backend_tensor_get(tensor, to + (first - position) * row,
                                        (span.cell + first - span.position) * row,
                                        (end - first) * row);
                n_found += end - first;
            }
        }
        to += n * row;
    }
    DFL_CHECK(n_found == n * static_cast<int64_t>(tensors().size()), DFL_STATUS_INTERNAL,
              "sequence %d lacks rows of %lld from position %d on", sequence, (long long)n,
              position);
}

void KvCache::read_cells(int64_t cell, int64_t n, uint8_t * to) const {
    for (const ggml_tensor * tensor : tensors()) {
        ggml_backend_tensor_get(tensor, to, cell * tensor->nb[1], n * tensor->nb[1]);
        to += n * tensor->nb[1];
    }
}

void KvCache::write_cells(int64_t cell, int64_t n, const uint8_t * from, int64_t first,
                          int64_t n_from) {
    for (ggml_tensor * tensor : tensors()) {
        const size_t row = tensor->nb[1];
        ggml_backend_tensor_set(tensor, from + first * row, cell * row, n * row);
        from += n_from * row;
    }
}

void KvCache::copy_cells(const CellTable::Copy & copy) {
    for (ggml_tensor * tensor : copy.n > 0 ? tensors() : std::vector<ggml_tensor *>()) {
        auto * rows = static_cast<char *>(tensor->data);
        const size_t row = tensor->nb[1];
        std::memcpy(rows + copy.to * row, rows + copy.from * row, copy.n * row);
    }
}

// Value heads lie beside each other by groups of as many as there are key heads, so that a product
// has one matrix for several groups; ggml's Vulkan backend has no such product.
static bool shares_keys(const Backend & backend, const RecurrentShape & shape) {
    const int64_t d = shape.d_state, n_k = shape.n_k_heads, n_groups = shape.n_v_heads / n_k;
    ggml_context_ptr ctx(ggml_init({3 * ggml_tensor_overhead(), nullptr, true}));
    ggml_tensor * keys = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, d, 1, n_k);
    ggml_tensor * states = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F32, d, d, n_k, n_groups);
    return backend.runs(ggml_mul_mat(ctx.get(), keys, states));
}

RecurrentCache::RecurrentCache(const Hparams & hp, const LayerPlace & place, int64_t n_sequences)
    : shape_(hp.recurrent), n_sequences_(n_sequences), part_(hp.n_layer(), nullptr),
      index_(hp.n_layer(), -1) {
    for (int64_t il = 0; il < hp.n_layer(); ++il) {
        if (!hp.layers[il].recurrent) {
            continue;
        }
        Backend & backend = place(il);
        auto found = std::find_if(parts_.begin(), parts_.end(),
                                  [&](const auto & part) { return part->backend == &backend; });
        if (found == parts_.end()) {
            found = parts_.insert(found, std::make_unique<RecurrentPart>());
            (*found)->backend = &backend;
            (*found)->shares_keys = shares_keys(backend, shape_);
        }
        part_[il] = found->get();
        index_[il] = (*found)->n_layers++;
    }
    for (const auto & part : parts_) {
        part->ctx.reset(ggml_init({2 * ggml_tensor_overhead(), nullptr, true}));
        ggml_context * ctx = part->ctx.get();
        part->state = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, shape_.state_size(), part->n_layers,
                                         n_sequences);
        part->conv =
            ggml_new_tensor_3d(ctx, GGML_TYPE_F32, shape_.conv_channels() * (shape_.d_conv - 1),
                               part->n_layers, n_sequences);
        part->memory = part->backend->allocate(ctx, "the recurrent state");
    }
}

void RecurrentCache::reserve_trace(int64_t n) {
    std::vector<RecurrentPart> fresh(parts_.size());
    for (size_t i = 0; i < parts_.size(); ++i) {
        RecurrentPart & to = fresh[i];
        to.trace_ctx.reset(ggml_init({2 * ggml_tensor_overhead(), nullptr, true}));
        ggml_context * ctx = to.trace_ctx.get();
        const int64_t layers = parts_[i]->n_layers;
        to.trace = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, shape_.trace_size(), n, layers);
        to.conv_trace = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, shape_.conv_channels(),
                                           n_sequences_ * (shape_.d_conv - 1) + n, layers);
        to.trace_memory = parts_[i]->backend->allocate(ctx, "the trace of a verify");
    }
    for (size_t i = 0; i < parts_.size(); ++i) {
        parts_[i]->trace_memory = std::move(fresh[i].trace_memory);
        parts_[i]->trace_ctx = std::move(fresh[i].trace_ctx);
        parts_[i]->trace = fresh[i].trace;
        parts_[i]->conv_trace = fresh[i].conv_trace;
    }
}

uint64_t RecurrentCache::bytes() const {
    uint64_t sum = 0;
    for (const auto & part : parts_) {
        sum += part->memory.bytes;
    }
    return sum;
}

uint64_t RecurrentCache::sequence_bytes() const {
    uint64_t sum = 0;
    for (const auto & part : parts_) {
        sum += part->state->nb[2] + part->conv->nb[2];
    }
    return sum;
}

uint64_t RecurrentCache::trace_bytes() const {
    uint64_t sum = 0;
    for (const auto & part : parts_) {
        sum += part->trace_memory.bytes;
    }
    return sum;
}

uint64_t RecurrentCache::bytes_on(const Backend * backend) const {
    uint64_t sum = 0;
    for (const auto & part : parts_) {
        sum += part->backend == backend ? part->memory.bytes : 0;
    }
    return sum;
}

uint64_t RecurrentCache::trace_bytes_on(const Backend * backend) const {
    uint64_t sum = 0;
    for (const auto & part : parts_) {
        sum += part->backend == backend ? part->trace_memory.bytes : 0;
    }
    return sum;
}

template <typename Visit>
void RecurrentCache::for_each_row(int32_t sequence, Visit && visit) const {
    for (const bool is_state : {true, false}) {
        for (const auto & part : parts_) { // which have layers side by side
            ggml_tensor * tensor = is_state ? part->state : part->conv;
            visit(*part, tensor, sequence * tensor->nb[2], tensor->nb[2]);
        }
    }
}

void RecurrentCache::clear(int32_t sequence) {
    for_each_row(sequence,
                 [](const RecurrentPart &, ggml_tensor * tensor, size_t offset, size_t size) {
                     ggml_backend_tensor_memset(tensor, 0, offset, size);
                 });
}

std::vector<uint8_t> RecurrentCache::save(int32_t sequence) const {
    std::vector<uint8_t> bytes;
    for_each_row(sequence,
                 [&](const RecurrentPart & part, ggml_tensor * tensor, size_t offset, size_t size) {
                     const size_t at = bytes.size();
                     bytes.resize(at + size);
                     part.backend->read(tensor, bytes.data() + at, offset, size);
                 });
    return bytes;
}

void RecurrentCache::load(int32_t sequence, const std::vector<uint8_t> & bytes) {
    size_t at = 0;
    for_each_row(sequence,
                 [&](const RecurrentPart &, ggml_tensor * tensor, size_t offset, size_t size) {
                     ggml_backend_tensor_set(tensor, bytes.data() + at, offset, size);
                     at += size;
                 });
}

} // namespace dfl
