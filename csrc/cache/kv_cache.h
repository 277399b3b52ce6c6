// K and V of every attention layer, in cells, by groups of layers that keep the same rows.
//
// Accepting or dropping rows changes the table of cells, and on the CPU the order of the rows.
#pragma once

#include "cache/kv_group.h"

#include <cstdint>
#include <ggml-cpp.h>
#include <map>
#include <vector>

namespace dfl {

struct KvSizes {
    int64_t n_cells;     // of layers that see all
    int64_t n_rows;      // most of a pass, for the masks
    int32_t n_sequences; // most of these
    // Layers with a window have no more cells than KvGroup::cells_needed() says of these; none: as
    // many as the others.
    KvGroup::UncommittedRows uncommitted = {0, 0};
};

// K and V of every attention layer, where the layer lies, by groups of layers.
class KvCache {
  public:
    // Throws DFL_STATUS_UNSUPPORTED for a pair of types a device cannot attend with, and
    // DFL_STATUS_MEMORY naming the bytes.
    KvCache(const Hparams & hp, const LayerPlace & place, ggml_type type_k, ggml_type type_v,
            const KvSizes & sizes);

    ggml_tensor * k(int64_t il) const { return layers_[il].k; }
    ggml_tensor * v(int64_t il) const { return layers_[il].v; }
    // Hadamard matrices that spread outliers before quantising; NULL where nothing is quantised.
    ggml_tensor * rotation_k(int64_t il) const { return parts_.at(layers_[il].backend).rotation_k; }
    ggml_tensor * rotation_v(int64_t il) const { return parts_.at(layers_[il].backend).rotation_v; }
    // Whether a layer attends in our own code, which takes visible cells in place of a mask.
    bool attends_on_host(int64_t il) const { return layers_[il].attends_on_host; }

    // The first holds every row of every sequence, even if no layer is in it.
    std::vector<KvGroup> & groups() { return groups_; }
    const std::vector<KvGroup> & groups() const { return groups_; }
    // Of an attention layer, and its place among them.
    const KvGroup & group(int64_t il) const { return groups_[layers_[il].group]; }
    int64_t group_index(int64_t il) const { return layers_[il].group; }
    // Of the first group: what sequences can take.
    CellTable & cells() { return groups_.front().cells(); }
    const CellTable & cells() const { return groups_.front().cells(); }
    int32_t n_sequences() const { return n_sequences_; }

    // Bytes of K and V alone, on one device or on all.
    uint64_t bytes(const Backend * on = nullptr) const;
    // Makes room for masks of more rows, as CellMasks::reserve().
    void reserve_masks(int64_t n_rows);
    uint64_t mask_bytes(const Backend * on = nullptr) const;
    // Forgets a sequence in every group.
    void clear(int32_t sequence);

    // True if some layers have a window and forget what has left it. As of a group, in all of them:
    bool has_windows() const { return groups_.size() > 1; }
    void slide_window(int32_t sequence, int64_t position);

  private:
    // What lies on one device.
    struct Part {
        ggml_context_ptr ctx;
        Allocation memory;
        ggml_tensor * rotation_k = nullptr;
        ggml_tensor * rotation_v = nullptr;
    };
    struct Layer {
        Backend * backend = nullptr; // NULL for recurrent ones
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
