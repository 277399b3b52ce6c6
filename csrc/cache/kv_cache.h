// K and V of all attention layers, in groups of layers that keep the same rows.
#pragma once

#include "cache/kv_group.h"

#include <cstdint>
#include <ggml-cpp.h>
#include <map>
#include <vector>

namespace dfl {

struct KvSizes {
    int64_t n_cells; // number of cells of layers without a window
    int64_t n_rows;  // number of rows of the largest pass
    int32_t n_sequences;
    // Largest numbers of uncommitted rows (one sequence, all), for which layers with a window get
    // cells beside the window. {0, 0}: they get n_cells.
    KvGroup::UncommittedRows uncommitted = {0, 0};
};

class KvCache {
  public:
    // Throws DFL_STATUS_UNSUPPORTED (a device cannot attend to type_k, type_v), DFL_STATUS_MEMORY.
    KvCache(const Hparams & hp, const LayerPlace & place, ggml_type type_k, ggml_type type_v,
            const KvSizes & sizes);

    ggml_tensor * k(int64_t il) const { return layers_[il].k; }
    ggml_tensor * v(int64_t il) const { return layers_[il].v; }
    // Hadamard matrices that spread outliers before K and V are quantised; NULL: no rotation.
    ggml_tensor * rotation_k(int64_t il) const { return parts_.at(layers_[il].backend).rotation_k; }
    ggml_tensor * rotation_v(int64_t il) const { return parts_.at(layers_[il].backend).rotation_v; }
    // True if a layer runs our own CPU attention, which reads visible cells instead of a mask.
    bool attends_on_host(int64_t il) const { return layers_[il].attends_on_host; }

    // Returns the K/V groups. The first has all rows of all sequences, even if no layer is in it.
    std::vector<KvGroup> & groups() { return groups_; }
    const std::vector<KvGroup> & groups() const { return groups_; }
    const KvGroup & group(int64_t il) const { return groups_[layers_[il].group]; }
    int64_t group_index(int64_t il) const { return layers_[il].group; }
    // Cell table of the first group, which limits the tokens of all sequences.
    CellTable & cells() { return groups_.front().cells(); }
    const CellTable & cells() const { return groups_.front().cells(); }
    int32_t n_sequences() const { return n_sequences_; }

    // Returns the bytes of K and V, without masks, on a device or (NULL) on all devices.
    uint64_t bytes(const Backend * on = nullptr) const;
    void reserve_masks(int64_t n_rows);
    uint64_t mask_bytes(const Backend * on = nullptr) const;
    // Zeroes the K/V of a sequence and of free cells, in every group.
    void clear(int32_t sequence);

    // True if some layers have a window, so that slide_window() frees cells.
    bool has_windows() const { return groups_.size() > 1; }
    void slide_window(int32_t sequence, int64_t position);

  private:
    // K/V tensors and rotations on one device.
    struct Part {
        ggml_context_ptr ctx;
        Allocation memory;
        ggml_tensor * rotation_k = nullptr;
        ggml_tensor * rotation_v = nullptr;
    };
    struct Layer {
        Backend * backend = nullptr; // device of the layer; NULL for recurrent layers
        ggml_tensor *k = nullptr, *v = nullptr;
        bool attends_on_host = false;
        int64_t group = -1;
    };

    void make_group(const Hparams & hp, const LayerPlace & place, int64_t window, int64_t n_cells,
                    const KvSizes & sizes);

    std::map<Backend *, Part> parts_;
    std::vector<Layer> layers_;
    std::vector<KvGroup> groups_;
    int32_t n_sequences_;
};

} // namespace dfl
