// The states and convolution inputs of linear-attention layers, a slot for each sequence.
#pragma once

#include "device/backend.h"
#include "device/raw_bytes.h"
#include "model/hparams.h"

#include <cstdint>
#include <ggml-cpp.h>
#include <memory>
#include <vector>

namespace dfl {

// What the recurrent layers of one device remember.
struct RecurrentPart {
    Backend * backend = nullptr;
    int64_t n_layers = 0;
    ggml_context_ptr ctx, updates_ctx;
    Allocation memory, updates_memory;
    // [state_size, n_sequences, n_layers] and [conv_channels * (d_conv - 1), n_sequences,
    // n_layers]; the newest convolution input lies last.
    ggml_tensor * state = nullptr;
    ggml_tensor * conv = nullptr;
    // Per node, k (not normed) | v | g, or exp(g) of own code | beta: [node_update_size,
    // n_update_rows, n_layers]. And of each verify the committed convolution inputs, then its
    // nodes': [conv_channels, n_conv_update_rows = n_sequences * (d_conv - 1) + n_update_rows,
    // n_layers]. NULL until room was made.
    ggml_tensor * node_updates = nullptr;
    ggml_tensor * conv_updates = nullptr;

    // Update rows for nodes of pending verifies. Where batches are padded there are two more:
    // padding is written to the first, and read from the second, which is 0.
    int64_t n_update_rows = 0, n_conv_update_rows = 0;
    int64_t padding_row() const { return n_update_rows; }
    int64_t zero_row() const { return n_update_rows + 1; }
    int64_t padding_conv_row() const { return n_conv_update_rows; }
};

// Update rows of a verify: of its first node, and of the first committed convolution input.
struct UpdateRows {
    int64_t first = 0, first_conv = 0;
};

// One sequence's rows [first, first + n) of a pass, as recurrent layers take them.
struct RecurrentRows {
    int32_t sequence;
    int64_t first, n;
    bool is_verify; // else they advance the state
    UpdateRows updates;
    std::vector<int32_t> parents; // -1, or an earlier of these rows; empty: each follows the last
    std::vector<int32_t> taps;    // likewise, [d_conv][n]: rows of (committed ++ new) inputs
};

// Update rows that a sequence's state is advanced by, and convolution updates that become its last
// inputs.
struct AcceptedPath {
    int32_t sequence;
    std::vector<int32_t> nodes;
    std::vector<int32_t> conv;
};

// State and last convolution inputs of every recurrent layer, one slot a sequence; and, for
// verifying, the updates of each node.
class RecurrentCache {
  public:
    RecurrentCache(const Hparams & hp, const LayerPlace & place, int64_t n_sequences);
    // Makes room for verifies of up to n nodes, forgetting all updates. pads: and for padding.
    // Throws DFL_STATUS_MEMORY and changes nothing.
    void reserve_updates(int64_t n, bool pads);

    // One for each device that has recurrent layers.
    const std::vector<std::unique_ptr<RecurrentPart>> & parts() const { return parts_; }
    const RecurrentPart & part_of(int64_t il) const { return *part_[il]; }
    // Index of a layer among the recurrent ones of its device.
    int64_t index(int64_t il) const { return index_[il]; }

    // Inputs of our own code in the next run of a graph.
    std::vector<RecurrentRows> pass_rows;
    std::vector<AcceptedPath> accepted;

    void clear(int32_t sequence);
    // A sequence's state as bytes, of all layers in their order, then its convolution inputs; and
    // back.
    RawBytes save(int32_t sequence) const;
    void load(int32_t sequence, const RawBytes & bytes);
    uint64_t sequence_bytes() const;
    // Bytes of states, and of updates, on one device or on all.
    uint64_t bytes(const Backend * on = nullptr) const;
    uint64_t update_bytes(const Backend * on = nullptr) const;

  private:
    template <typename Visit>
    void for_each_part(int32_t sequence, Visit && visit) const;

    RecurrentShape shape_;
    int64_t n_sequences_;
    std::vector<std::unique_ptr<RecurrentPart>> parts_;
    std::vector<const RecurrentPart *> part_; // NULL for other layers
    std::vector<int64_t> index_;
};

} // namespace dfl
