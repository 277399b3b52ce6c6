// States and convolution inputs of recurrent (Gated DeltaNet) layers, a slot for each sequence.
#pragma once

#include "device/backend.h"
#include "device/raw_bytes.h"
#include "model/hparams.h"

#include <cstdint>
#include <ggml-cpp.h>
#include <memory>
#include <vector>

namespace dfl {

// Tensors of the recurrent layers of one device.
struct RecurrentPart {
    Backend * backend = nullptr;
    bool has_kernels = false; // true: kernels of our own compute verifies and promotions
    int64_t n_layers = 0;
    ggml_context_ptr ctx, updates_ctx;
    Allocation memory, updates_memory;
    // Committed states [state_size, n_sequences, n_layers] and last convolution inputs, newest
    // last, [conv_channels * (d_conv - 1), n_sequences, n_layers].
    ggml_tensor * state = nullptr;
    ggml_tensor * conv = nullptr;
    // Updates by the nodes of pending verifies; NULL before reserve_updates(). node_updates: each
    // node's k (not normed), v, g (exp(g) for our own CPU code) and beta, [node_update_size,
    // n_update_rows, n_layers]; k (normed), u and g for our own kernels. conv_updates: for each
    // verify, its committed convolution inputs, then its nodes' inputs, [conv_channels,
    // n_conv_update_rows, n_layers].
    ggml_tensor * node_updates = nullptr;
    ggml_tensor * conv_updates = nullptr;

    // Number of rows for nodes of pending verifies. Two more rows serve padding: padding_row() is
    // only written to, and zero_row() stays 0.
    int64_t n_update_rows = 0, n_conv_update_rows = 0;
    int64_t padding_row() const { return n_update_rows; }
    int64_t zero_row() const { return n_update_rows + 1; }
    int64_t padding_conv_row() const { return n_conv_update_rows; }
};

// First rows of a verify in node_updates and conv_updates.
struct UpdateRows {
    int64_t first = 0, first_conv = 0;
};

struct RecurrentRows {
    int32_t sequence;
    int64_t first, n;
    bool is_verify; // true: rows of a verify; false: rows that advance the committed state
    UpdateRows updates;
    std::vector<int32_t> parents; // index of each row's parent row, or -1; empty: a chain
    std::vector<int32_t> taps;    // tree: index of each convolution tap's input; empty: a chain
};

// Accepted nodes of a verify, as rows of node_updates, and the sequence's new convolution inputs,
// as d_conv - 1 rows of conv_updates.
struct AcceptedPath {
    int32_t sequence;
    std::vector<int32_t> nodes;
    std::vector<int32_t> conv;
};

class RecurrentCache {
  public:
    RecurrentCache(const Hparams & hp, const LayerPlace & place, int64_t n_sequences);
    // Makes room for the updates of n nodes, and drops earlier updates. pads: adds rows for
    // padding. If it throws DFL_STATUS_MEMORY, nothing has changed.
    void reserve_updates(int64_t n, bool pads);

    const std::vector<std::unique_ptr<RecurrentPart>> & parts() const { return parts_; }
    const RecurrentPart & part_of(int64_t il) const { return *part_[il]; }
    // Returns the index of a layer among the recurrent layers of its device.
    int64_t index(int64_t il) const { return index_[il]; }

    // Rows and accepted paths that our own CPU code reads in the next run of a graph.
    std::vector<RecurrentRows> pass_rows;
    std::vector<AcceptedPath> accepted;

    void clear(int32_t sequence);
    // Copy a sequence's slot to bytes and back: states of all layers, then convolution inputs.
    RawBytes save(int32_t sequence) const;
    void load(int32_t sequence, const RawBytes & bytes);
    uint64_t sequence_bytes() const;
    // Return the bytes of states, and of node updates, on a device or (NULL) on all devices.
    uint64_t bytes(const Backend * on = nullptr) const;
    uint64_t update_bytes(const Backend * on = nullptr) const;

  private:
    template <typename Visit>
    void for_each_part(int32_t sequence, Visit && visit) const;

    RecurrentShape shape_;
    int64_t n_sequences_;
    std::vector<std::unique_ptr<RecurrentPart>> parts_;
    std::vector<const RecurrentPart *> part_; // tensors of each layer; NULL for attention layers
    std::vector<int64_t> index_;
};

} // namespace dfl
