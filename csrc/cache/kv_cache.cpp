#include "cache/kv_cache.h"

#include "cpu/rows/row_kernel.h"
#include "error.h"

#include <algorithm>
#include <cmath>

namespace dfl {

// True if the device can attend to, and write, this pair of K/V types with this head size.
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

// Fills an orthonormal Walsh-Hadamard matrix: entry (i, j) has the sign of popcount(i & j).
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

static std::vector<int64_t> cells_of(const Hparams & hp, const LayerPlace & place,
                                     const std::vector<int64_t> & windows, const KvSizes & sizes) {
    std::vector<int64_t> cells;
    for (const int64_t window : windows) {
        bool is_host = true;
        for (int64_t il = 0; il < hp.n_layer(); ++il) {
            is_host = is_host && (windows[il] != window || place(il).is_host());
        }
        const int64_t n =
            KvGroup::cells_needed(window, sizes.n_sequences, sizes.uncommitted, is_host);
        const bool is_apart = window > 0 && sizes.uncommitted.total > 0;
        // CUDA's flash attention is fastest over a multiple of 256 cells.
        cells.push_back(is_apart ? std::min((n + 255) / 256 * 256, sizes.n_cells) : sizes.n_cells);
    }
    return cells;
}

static bool attends_in_own_code(const Hparams & hp, const LayerPlace & place, int64_t il) {
    const LayerShape & layer = hp.layers[il];
    const bool on_host = place(il).runs_cpu_nodes() &&
                         (layer.kv_layer < 0 || place(layer.kv_layer).runs_cpu_nodes());
    return !layer.recurrent && on_host && layer.head_dim <= cpu::MAX_ROTATED_HEAD;
}

// Returns the window of each layer's K/V, 0 for all positions: the largest window among the layers
// that read the same K/V.
static std::vector<int64_t> windows_of(const Hparams & hp) {
    std::vector<int64_t> windows;
    for (const LayerShape & layer : hp.layers) {
        windows.push_back(layer.window);
    }
    for (const LayerShape & layer : hp.layers) {
        if (layer.kv_layer >= 0) {
            int64_t & stored = windows[layer.kv_layer];
            stored = stored == 0 || layer.window == 0 ? 0 : std::max(stored, layer.window);
        }
    }
    for (int64_t il = 0; il < hp.n_layer(); ++il) {
        windows[il] = hp.layers[il].kv_layer >= 0 ? windows[hp.layers[il].kv_layer] : windows[il];
    }
    return windows;
}

// Adds the next K/V group, of the layers that are already assigned to it.
void KvCache::make_group(const Hparams & hp, const LayerPlace & place, int64_t window,
                         int64_t n_cells, const KvSizes & sizes) {
    std::vector<int64_t> masked;
    bool any_on_host = false;
    for (int64_t il = 0; il < hp.n_layer(); ++il) {
        const Layer & layer = layers_[il];
        if (layer.group == static_cast<int64_t>(groups_.size())) {
            any_on_host = any_on_host || layer.attends_on_host;
            if (!layer.attends_on_host) {
                masked.push_back(il);
            }
        }
    }
    groups_.emplace_back(window, CellTable(n_cells, sizes.n_sequences, /*packs =*/window > 0),
                         CellMasks(hp, masked, place, n_cells, sizes.n_rows), any_on_host);
}

KvCache::KvCache(const Hparams & hp, const LayerPlace & place, ggml_type type_k, ggml_type type_v,
                 const KvSizes & sizes)
    : layers_(hp.n_layer()), n_sequences_(sizes.n_sequences) {
    for (int64_t il = 0; il < hp.n_layer(); ++il) {
        if (!hp.layers[il].recurrent) {
            layers_[il].attends_on_host = attends_in_own_code(hp, place, il);
            layers_[il].group = 0;
        }
    }
    const std::vector<int64_t> windows = windows_of(hp);
    const std::vector<int64_t> cells = cells_of(hp, place, windows, sizes);
    // Window and number of cells of each K/V group after the first.
    std::vector<std::pair<int64_t, int64_t>> own_groups;
    for (int64_t il = 0; il < hp.n_layer(); ++il) {
        const std::pair<int64_t, int64_t> own = {windows[il], cells[il]};
        if (hp.layers[il].recurrent || own.second == sizes.n_cells) {
            continue;
        }
        const auto group = std::find(own_groups.begin(), own_groups.end(), own);
        layers_[il].group = group - own_groups.begin() + 1;
        if (group == own_groups.end()) {
            own_groups.push_back(own);
        }
    }
    make_group(hp, place, 0, sizes.n_cells, sizes);
    for (const auto & [window, n_cells] : own_groups) {
        make_group(hp, place, window, n_cells, sizes);
    }
    // Like llama.cpp, rotates K in blocks of the largest power of two that divides all head
    // sizes, and V in blocks of 64; no rotation if a head size is not a multiple of 64.
    int64_t block_k = ggml_is_quantized(type_k) ? int64_t(1) << 20 : 0;
    int64_t block_v = ggml_is_quantized(type_v) ? 64 : 0;
    for (int64_t il = 0; il < hp.n_layer(); ++il) {
        const LayerShape & shape = hp.layers[il];
        Layer & layer = layers_[il];
        if (shape.recurrent) {
            continue;
        }
        if (shape.kv_layer >= 0) { // the layer reads the K and V of an earlier layer
            const Layer & of = layers_[shape.kv_layer];
            layer.backend = of.backend;
            layer.k = of.k;
            layer.v = of.v;
            continue;
        }
        Backend & backend = place(il);
        check_types(backend, shape, type_k, type_v);
        Part & part = parts_[&backend];
        if (!part.ctx) {
            part.ctx.reset(
                ggml_init({(2 * hp.layers.size() + 2) * ggml_tensor_overhead(), nullptr, true}));
        }
        KvGroup & group = groups_[layer.group];
        const int64_t width = shape.head_dim * shape.n_head_kv, n_cells = group.cells().n_cells();
        layer.backend = &backend;
        layer.k = ggml_new_tensor_2d(part.ctx.get(), type_k, width, n_cells);
        layer.v = ggml_new_tensor_2d(part.ctx.get(), type_v, width, n_cells);
        ggml_format_name(layer.k, "k.%lld", (long long)il);
        ggml_format_name(layer.v, "v.%lld", (long long)il);
        group.add_layer(backend, layer.k, layer.v);
        block_k = std::min(block_k, shape.head_dim & -shape.head_dim);
        block_v = shape.head_dim % 64 == 0 ? block_v : 0;
    }
    for (auto & [backend, part] : parts_) {
        auto rotation = [&, ctx = part.ctx.get()](int64_t block) {
            return block >= 64 ? ggml_new_tensor_2d(ctx, GGML_TYPE_F32, block, block) : nullptr;
        };
        part.rotation_k = rotation(block_k);
        part.rotation_v = rotation(block_v);
        part.memory = backend->allocate(
            part.ctx.get(), format("a K/V cache of %lld cells", (long long)sizes.n_cells).c_str());
        for (ggml_tensor * matrix : {part.rotation_k, part.rotation_v}) {
            if (matrix != nullptr && !backend->is_dry_run()) {
                set_hadamard(matrix);
            }
        }
    }
}

uint64_t KvCache::bytes(const Backend * on) const {
    uint64_t sum = 0;
    for (const auto & [backend, part] : parts_) {
        sum += on == nullptr || backend == on ? part.memory.bytes : 0;
    }
    return sum;
}

void KvCache::reserve_masks(int64_t n_rows) {
    for (KvGroup & group : groups_) {
        group.masks().reserve(n_rows);
    }
}

uint64_t KvCache::mask_bytes(const Backend * on) const {
    uint64_t sum = 0;
    for (const KvGroup & group : groups_) {
        sum += group.masks().bytes(on);
    }
    return sum;
}

void KvCache::clear(int32_t sequence) {
    for (KvGroup & group : groups_) {
        group.clear(sequence);
    }
}

void KvCache::slide_window(int32_t sequence, int64_t position) {
    for (KvGroup & group : groups_) {
        group.slide_window(sequence, position);
    }
}

} // namespace dfl
