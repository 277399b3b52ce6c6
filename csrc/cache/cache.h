// What an engine remembers: K/V rows in cells, and the recurrent state of linear-attention layers.
//
// Accepting or dropping K/V rows changes the table of cells, and on the CPU the order of the rows.
#pragma once

#include "cache/cell_masks.h"
#include "cache/seen_cells.h"

#include <cstdint>
#include <ggml-cpp.h>
#include <map>
#include <memory>
#include <vector>

namespace dfl {

// K and V of every attention layer, where the layer lies: [head_dim * n_head_kv, n_cells] each.
class KvCache;
using KvGroup = KvCache;

class KvCache {
  public:
    struct Groups {
        KvCache * c;
        KvCache * begin() const { return c; }
        KvCache * end() const { return c + 1; }
        KvCache & front() const { return *c; }
        KvCache & operator[](size_t) const { return *c; }
        size_t size() const { return 1; }
    };
    Groups groups() const { return {const_cast<KvCache *>(this)}; }
    int64_t window() const { return 0; }
    // n_rows: most rows of a pass, for the masks. Throws DFL_STATUS_UNSUPPORTED for a pair of types
    // a device cannot attend with, and DFL_STATUS_MEMORY naming the bytes.
    KvCache(const Hparams & hp, const LayerPlace & place, ggml_type type_k, ggml_type type_v,
            int64_t n_cells, int64_t n_rows, int32_t n_sequences);

    ggml_tensor * k(int64_t il) const { return k_[il]; }
    ggml_tensor * v(int64_t il) const { return v_[il]; }
    // Hadamard matrices that spread outliers before quantising; NULL where nothing is quantised.
    ggml_tensor * rotation_k(int64_t il) const { return parts_.at(part_[il]).rotation_k; }
    ggml_tensor * rotation_v(int64_t il) const { return parts_.at(part_[il]).rotation_v; }

    CellTable & cells() { return cells_; }
    const CellTable & cells() const { return cells_; }
    CellMasks & masks() { return masks_; }
    const CellMasks & masks() const { return masks_; }
    // Whether a layer attends in our own code, which takes seen() in place of a mask.
    bool attends_on_host(int64_t il) const { return !has_mask_[il]; }
    const std::vector<SeenRows> & seen() const { return seen_; }
    // Most of these.
    int32_t n_sequences() const { return n_sequences_; }
    // Makes the masks and seen() those of the rows of the next pass, over the first n_kv cells.
    void set_rows(const MaskRows & rows, int64_t n_kv);
    // Of K and V alone.
    uint64_t bytes() const;
    uint64_t bytes_on(const Backend * backend) const;
    // Whether all of it lies in host memory.
    bool is_host() const;
    // Copies a cell's rows of every layer into another cell. Host memory only.
    void copy_row(int64_t from, int64_t to);
    // Zeroes what is stored in the cells of a sequence and in those that nobody holds, and touches
    // no memory that was never written to; the table stays.
    void clear(int32_t sequence);
    void clear_cell(int64_t cell);
    // In the cells of a sequence from a position on.
    void clear_from(int32_t sequence, int32_t position);
    // CellTable::release_from() with what it wants copied.
    void release_from(int32_t sequence, int32_t position);

    // Whether sequences may share pages of cells: where every layer attends in our own code, which
    // takes rows where they lie and to which hidden ones are nothing.
    bool shares_pages() const { return masks_.empty() && is_host(); }
    // The tensors that rows lie in: K of each layer that has one, then V.
    std::vector<ggml_tensor *> tensors() const;
    // Bytes of one cell in all of them.
    uint64_t row_bytes() const;
    // Copies rows out, tensor by tensor, those of each side by side: of n rows of a sequence from a
    // position on, which must be there.
    void read_rows(int32_t sequence, int32_t position, int64_t n, uint8_t * to) const;
    // Of n cells side by side; and back, the first n of n_from rows.
    void read_cells(int64_t cell, int64_t n, uint8_t * to) const;
    void write_cells(int64_t cell, int64_t n, const uint8_t * from, int64_t first, int64_t n_from);
    // Host memory only.
    void copy_cells(const CellTable::Copy & copy);

  private:
    void zero(int64_t first, int64_t n);

    // What lies on one device.
    struct Part {
        ggml_context_ptr ctx;
        Allocation memory;
        ggml_tensor * rotation_k = nullptr;
        ggml_tensor * rotation_v = nullptr;
    };
    std::map<Backend *, Part> parts_;
    std::vector<Backend *> part_;      // of each layer; NULL for recurrent ones
    std::vector<ggml_tensor *> k_, v_; // NULL for recurrent layers
    CellTable cells_;
    std::vector<bool> has_mask_;   // of attention layers; recurrent ones have none either
    bool attends_on_host_ = false; // some layer does
    CellMasks masks_;
    int32_t n_sequences_;
    std::vector<SeenRows> seen_;
};

// What the recurrent layers of one device remember.
struct RecurrentPart {
    Backend * backend = nullptr;
    bool shares_keys = true; // whether a product takes a key head for all of its value heads
    int64_t n_layers = 0;
    ggml_context_ptr ctx, trace_ctx;
    Allocation memory, trace_memory;
    // [state_size, n_layers, n_sequences] and [conv_channels * (d_conv - 1), n_layers,
    // n_sequences]; the newest convolution input lies last.
    ggml_tensor * state = nullptr;
    ggml_tensor * conv = nullptr;
    // Per node, k (not normed) | v | g, or exp(g) of own code | beta: [trace_size, n_trace,
    // n_layers]. And of each verify the committed convolution inputs, then its nodes':
    // [conv_channels, n_sequences * (d_conv - 1) + n_trace, n_layers]. NULL until room was made.
    ggml_tensor * trace = nullptr;
    ggml_tensor * conv_trace = nullptr;
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
    // Makes room for verifies of up to n nodes, forgetting any trace. Throws DFL_STATUS_MEMORY and
    // changes nothing.
    void reserve_trace(int64_t n);

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
    std::vector<uint8_t> save(int32_t sequence) const;
    void load(int32_t sequence, const std::vector<uint8_t> & bytes);
    uint64_t sequence_bytes() const;
    uint64_t bytes() const;
    uint64_t trace_bytes() const;
    uint64_t bytes_on(const Backend * backend) const;
    uint64_t trace_bytes_on(const Backend * backend) const;

  private:
    template <typename Visit>
    void for_each_row(int32_t sequence, Visit && visit) const;

    RecurrentShape shape_;
    int64_t n_sequences_;
    std::vector<std::unique_ptr<RecurrentPart>> parts_;
    std::vector<const RecurrentPart *> part_; // NULL for other layers
    std::vector<int64_t> index_;
};

} // namespace dfl
