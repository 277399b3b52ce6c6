#include "cache.h"

#include "error.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace dfl {

std::vector<int64_t> CellTable::find_free(int64_t n) const {
    DFL_CHECK(n <= n_free(), DFL_STATUS_ARGUMENT,
              "%lld rows do not fit: %lld of %lld cells are free", (long long)n,
              (long long)n_free(), (long long)size());
    std::vector<int64_t> cells;
    cells.reserve(n);
    for (int64_t cell = first_free_; static_cast<int64_t>(cells.size()) < n; ++cell) {
        if (sequence_[cell] == FREE) {
            cells.push_back(cell);
        }
    }
    if (n > 0) {
        first_free_ = cells.front();
    }
    return cells;
}

void CellTable::own(int64_t cell, int32_t sequence, int32_t position) {
    n_used_ += sequence_[cell] == FREE;
    sequence_[cell] = sequence;
    position_[cell] = position;
    high_ = std::max(high_, cell + 1);
}

void CellTable::release(int64_t cell) {
    n_used_ -= sequence_[cell] != FREE;
    sequence_[cell] = FREE;
    position_[cell] = FREE;
    first_free_ = std::min(first_free_, cell);
    while (high_ > 0 && sequence_[high_ - 1] == FREE) {
        --high_;
    }
}

void CellTable::release_from(int32_t sequence, int32_t position) {
    for (int64_t cell = high_ - 1; cell >= 0; --cell) {
        if (sequence_[cell] == sequence && position_[cell] >= position) {
            release(cell);
        }
    }
}

void CellTable::release_before(int32_t sequence, int32_t position) {
    for (int64_t cell = high_ - 1; cell >= 0; --cell) {
        if (sequence_[cell] == sequence && position_[cell] < position) {
            release(cell);
        }
    }
}

void CellTable::mask_row(int32_t sequence, int32_t position, int64_t window, bool causal,
                         ggml_fp16_t * row, int64_t n) const {
    static const ggml_fp16_t hidden = ggml_fp32_to_fp16(-INFINITY);
    static const ggml_fp16_t visible = ggml_fp32_to_fp16(0.0f);
    const int32_t * seq = sequence_.data();
    const int32_t * pos = position_.data();
    const int64_t reach = window > 0 ? window - 1 : INT32_MAX;
    const auto oldest = static_cast<int32_t>(std::max<int64_t>(0, position - reach));
    const auto newest =
        causal ? position : static_cast<int32_t>(std::min<int64_t>(INT32_MAX, position + reach));
    for (int64_t cell = 0; cell < n; ++cell) {
        const bool sees = seq[cell] == sequence && pos[cell] >= oldest && pos[cell] <= newest;
        row[cell] = sees ? visible : hidden;
    }
}

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
    throw Error(
        DFL_STATUS_UNSUPPORTED,
        format("cache types %s/%s do not work on %s with heads of %lld values; valid (K/V): %s",
               ggml_type_name(type_k), ggml_type_name(type_v), backend.name(),
               (long long)layer.head_dim, valid.c_str()));
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

KvCache::KvCache(const Hparams & hp, Backend & backend, ggml_type type_k, ggml_type type_v,
                 int64_t n_cells)
    : k_(hp.n_layer(), nullptr), v_(hp.n_layer(), nullptr), cells_(n_cells) {
    ctx_.reset(ggml_init({(2 * hp.layers.size() + 2) * ggml_tensor_overhead(), nullptr, true}));
    // Block sizes of the rotations are those llama.cpp uses: the largest power of two that divides
    // every K head, 64 for V; none where a head is not a multiple of 64.
    int64_t block_k = ggml_is_quantized(type_k) ? int64_t(1) << 20 : 0;
    int64_t block_v = ggml_is_quantized(type_v) ? 64 : 0;
    for (int64_t il = 0; il < hp.n_layer(); ++il) {
        const LayerShape & layer = hp.layers[il];
        if (layer.recurrent) {
            continue;
        }
        check_types(backend, layer, type_k, type_v);
        const int64_t width = layer.head_dim * layer.n_head_kv;
        k_[il] = ggml_new_tensor_2d(ctx_.get(), type_k, width, n_cells);
        v_[il] = ggml_new_tensor_2d(ctx_.get(), type_v, width, n_cells);
        block_k = std::min(block_k, layer.head_dim & -layer.head_dim);
        block_v = layer.head_dim % 64 == 0 ? block_v : 0;
    }
    if (block_k >= 64) {
        rotation_k_ = ggml_new_tensor_2d(ctx_.get(), GGML_TYPE_F32, block_k, block_k);
    }
    if (block_v >= 64) {
        rotation_v_ = ggml_new_tensor_2d(ctx_.get(), GGML_TYPE_F32, block_v, block_v);
    }
    memory_ = backend.allocate(ctx_.get(),
                               format("a K/V cache of %lld cells", (long long)n_cells).c_str());
    for (ggml_tensor * rotation : {rotation_k_, rotation_v_}) {
        if (rotation != nullptr && !backend.measures()) {
            set_hadamard(rotation);
        }
    }
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

void KvCache::clear() {
    for (const auto & tensors : {k_, v_}) {
        for (ggml_tensor * tensor : tensors) {
            if (tensor != nullptr) {
                ggml_backend_tensor_memset(tensor, 0, 0, ggml_nbytes(tensor));
            }
        }
    }
}

RecurrentCache::RecurrentCache(const Hparams & hp, Backend & backend, int64_t n_sequences)
    : backend_(backend), shape_(hp.recurrent), index_(hp.n_layer(), -1) {
    const int64_t n_layers = hp.n_recurrent();
    if (n_layers == 0) {
        return;
    }
    for (int64_t il = 0, next = 0; il < hp.n_layer(); ++il) {
        if (hp.layers[il].recurrent) {
            index_[il] = next++;
        }
    }
    ctx_.reset(ggml_init({2 * ggml_tensor_overhead(), nullptr, true}));
    state_ =
        ggml_new_tensor_3d(ctx_.get(), GGML_TYPE_F32, shape_.state_size(), n_sequences, n_layers);
    conv_ = ggml_new_tensor_3d(ctx_.get(), GGML_TYPE_F32,
                               shape_.conv_channels() * (shape_.d_conv - 1), n_sequences, n_layers);
    memory_ = backend_.allocate(ctx_.get(), "the recurrent state");
}

void RecurrentCache::reserve_trace(int64_t n) {
    if (state_ == nullptr) {
        return;
    }
    const int64_t n_layers = state_->ne[2];
    ggml_context_ptr ctx(ggml_init({2 * ggml_tensor_overhead(), nullptr, true}));
    ggml_tensor * trace =
        ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, shape_.trace_size(), n, n_layers);
    ggml_tensor * conv_trace = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, shape_.conv_channels(),
                                                  shape_.d_conv - 1 + n, n_layers);
    trace_memory_ = backend_.allocate(ctx.get(), "the trace of a verify");
    trace_ctx_ = std::move(ctx);
    trace_ = trace;
    conv_trace_ = conv_trace;
}

template <typename Visit>
void RecurrentCache::for_each_row(int32_t sequence, Visit && visit) const {
    for (ggml_tensor * tensor : {state_, conv_}) {
        for (int64_t i = 0; tensor != nullptr && i < tensor->ne[2]; ++i) {
            visit(tensor, sequence * tensor->nb[1] + i * tensor->nb[2], tensor->nb[1]);
        }
    }
}

void RecurrentCache::clear(int32_t sequence) {
    for_each_row(sequence, [](ggml_tensor * tensor, size_t offset, size_t size) {
        ggml_backend_tensor_memset(tensor, 0, offset, size);
    });
}

std::vector<uint8_t> RecurrentCache::save(int32_t sequence, const Backend & backend) const {
    std::vector<uint8_t> bytes;
    for_each_row(sequence, [&](ggml_tensor * tensor, size_t offset, size_t size) {
        const size_t at = bytes.size();
        bytes.resize(at + size);
        backend.read(tensor, bytes.data() + at, offset, size);
    });
    return bytes;
}

void RecurrentCache::load(int32_t sequence, const std::vector<uint8_t> & bytes) {
    size_t at = 0;
    for_each_row(sequence, [&](ggml_tensor * tensor, size_t offset, size_t size) {
        ggml_backend_tensor_set(tensor, bytes.data() + at, offset, size);
        at += size;
    });
}

} // namespace dfl
