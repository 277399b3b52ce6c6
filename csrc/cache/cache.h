// What an engine remembers: K/V rows in cells, and the recurrent state of linear-attention layers.
//
// Accepting or dropping K/V rows changes the table of cells, and on the CPU the order of the rows.
#pragma once

#include "cache/kv_group.h"
#include "device/raw_bytes.h"

#include <cstdint>
#include <ggml-cpp.h>
#include <map>
#include <memory>
#include <vector>

namespace dfl {

struct KvSizes {
    int64_t n_cells;     // of layers that see all
    int64_t n_rows;      // most of a pass, for the masks
    int32_t n_sequences; // most of these
    // Layers with a window have no more cells than KvGroup::cells_wanted() says of these; none: as
    // many as the others.
    KvGroup::OpenRows open = {0, 0};
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
    // Whether a layer attends in our own code, which takes seen cells in place of a mask.
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

    // Of K and V alone.
    uint64_t bytes() const;
    uint64_t bytes_on(const Backend * backend) const;
    // Makes room for masks of more rows, as CellMasks::reserve().
    void reserve_masks(int64_t n_rows);
    uint64_t mask_bytes() const;
    uint64_t mask_bytes_on(const Backend * backend) const;
    uint64_t mask_bytes_written() const;
    // As of a group, in all of them.
    void clear(int32_t sequence);
    void clear_from(int32_t sequence, int32_t position);

    // Some layers forget what they do not see any more. As of a group, in all of them:
    bool forgets() const { return groups_.size() > 1; }
    void move_on(int32_t sequence, int64_t position, int64_t n_proven);
    bool holds_before(int32_t sequence, int64_t position) const;
    int64_t earliest(int32_t sequence) const;
    std::vector<uint8_t> save_windows(int32_t sequence, int64_t position) const;
    void load_windows(int32_t sequence, int64_t position, const std::vector<uint8_t> & bytes);

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

// What the recurrent layers of one device remember.
struct RecurrentPart {
    Backend * backend = nullptr;
    int64_t n_layers = 0;
    ggml_context_ptr ctx, trace_ctx;
    Allocation memory, trace_memory;
    // [state_size, n_sequences, n_layers] and [conv_channels * (d_conv - 1), n_sequences,
    // n_layers]; the newest convolution input lies last.
    ggml_tensor * state = nullptr;
    ggml_tensor * conv = nullptr;
    // Per node, k (not normed) | v | g, or exp(g) of own code | beta: [trace_size, n_trace,
    // n_layers]. And of each verify the committed convolution inputs, then its nodes':
    // [conv_channels, n_conv_trace = n_sequences * (d_conv - 1) + n_trace, n_layers]. NULL until
    // room was made.
    ggml_tensor * trace = nullptr;
    ggml_tensor * conv_trace = nullptr;

    // Rows of the trace for nodes that can be open. Where lanes are padded there are more: padding
    // is written to the first after them, and read from the second, where all is 0.
    int64_t n_trace = 0, n_conv_trace = 0;
    int64_t junk_row() const { return n_trace; }
    int64_t zero_row() const { return n_trace + 1; }
    int64_t junk_conv_row() const { return n_conv_trace; }
};

// Where the nodes of a verify lie in the trace: its first node's row, and that of the first
// committed convolution input.
struct TraceRows {
    int64_t first = 0, first_conv = 0;
};

// Rows [first, first + n) of a pass, of one sequence, as recurrent layers in our own code take
// them.
struct WalkedRows {
    int32_t sequence;
    int64_t first, n;
    bool verifies; // else they advance the state
    TraceRows trace;
    std::vector<int32_t> parents; // -1, or an earlier of these rows; empty: each follows the last
    std::vector<int32_t> taps;    // likewise, [d_conv][n]: rows of (committed ++ new) inputs
};

// Rows of the trace that a sequence's state moves along, and of the convolution's trace those that
// become its last inputs.
struct AcceptedPath {
    int32_t sequence;
    std::vector<int32_t> nodes;
    std::vector<int32_t> conv;
};

// State and last convolution inputs of every recurrent layer, one slot a sequence; and, for
// verifying, what each node would do to them.
class RecurrentCache {
  public:
    RecurrentCache(const Hparams & hp, const LayerPlace & place, int64_t n_sequences);
    // Makes room for verifies of up to n nodes, forgetting any trace. pads: and for padding. Throws
    // DFL_STATUS_MEMORY and changes nothing.
    void reserve_trace(int64_t n, bool pads);

    // One for each device that has recurrent layers.
    const std::vector<std::unique_ptr<RecurrentPart>> & parts() const { return parts_; }
    const RecurrentPart & part_of(int64_t il) const { return *part_[il]; }
    // Index of a layer among the recurrent ones of its device.
    int64_t index(int64_t il) const { return index_[il]; }

    // What graphs of our own code work on when they run next.
    std::vector<WalkedRows> walked;
    std::vector<AcceptedPath> accepted;

    void clear(int32_t sequence);
    // A sequence's state as bytes, of all layers in their order, then its convolution inputs; and
    // back.
    RawBytes save(int32_t sequence) const;
    void load(int32_t sequence, const RawBytes & bytes);
    uint64_t sequence_bytes() const;
    uint64_t bytes() const;
    uint64_t trace_bytes() const;
    uint64_t bytes_on(const Backend * backend) const;
    uint64_t trace_bytes_on(const Backend * backend) const;

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
