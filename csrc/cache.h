// What a session remembers: K/V rows in cells, and the recurrent state of linear-attention layers.
//
// A K or V row is position-free once rope is applied, so it may lie in any cell; the table says
// whose it is. Accepting or dropping rows changes the table, and on the CPU the order of the rows.
#pragma once

#include "backend.h"
#include "hparams.h"

#include <cstdint>
#include <functional>
#include <ggml-cpp.h>
#include <map>
#include <memory>
#include <vector>

namespace dfl {

// Host table: cell -> (sequence, position).
class CellTable {
  public:
    static constexpr int32_t FREE = -1;

    explicit CellTable(int64_t n_cells) : sequence_(n_cells, FREE), position_(n_cells, FREE) {}

    int64_t size() const { return static_cast<int64_t>(sequence_.size()) - n_reserved_; }
    // Takes the last cell out of use: padding may write there, and nobody sees it.
    void reserve_last() { n_reserved_ = 1; }
    int64_t n_free() const { return size() - n_used_; }
    // One past the highest used cell.
    int64_t high() const { return high_; }

    // The n lowest free cells; throws DFL_STATUS_ARGUMENT if there are fewer.
    std::vector<int64_t> find_free(int64_t n) const;
    void own(int64_t cell, int32_t sequence, int32_t position);
    void release(int64_t cell);
    // Frees the cells of a sequence from a position on.
    void release_from(int32_t sequence, int32_t position);

    // Frees the cells of a sequence before a position.
    void release_before(int32_t sequence, int32_t position);

    // Additive mask of one row, float16 [n]: 0 where (sequence, position) may look, else -inf.
    // window: keys a row may see, itself included; 0: all. causal false: also later positions,
    // as far as the window reaches.
    void mask_row(int32_t sequence, int32_t position, int64_t window, bool causal,
                  ggml_fp16_t * row, int64_t n) const;

  private:
    std::vector<int32_t> sequence_;
    std::vector<int32_t> position_;
    int64_t n_used_ = 0;
    int64_t high_ = 0;
    int64_t n_reserved_ = 0;
    mutable int64_t first_free_ = 0; // no free cell lies below
};

// The backend of each layer.
using LayerPlace = std::function<Backend &(int64_t il)>;

// K and V of every attention layer, where the layer lies: [head_dim * n_head_kv, n_cells] each.
class KvCache {
  public:
    // Throws DFL_STATUS_UNSUPPORTED for a pair of types a device cannot attend with, and
    // DFL_STATUS_MEMORY naming the bytes.
    KvCache(const Hparams & hp, const LayerPlace & place, ggml_type type_k, ggml_type type_v,
            int64_t n_cells);

    ggml_tensor * k(int64_t il) const { return k_[il]; }
    ggml_tensor * v(int64_t il) const { return v_[il]; }
    // Hadamard matrices that even out what is quantised; NULL where nothing is.
    ggml_tensor * rotation_k(int64_t il) const { return parts_.at(part_[il]).rotation_k; }
    ggml_tensor * rotation_v(int64_t il) const { return parts_.at(part_[il]).rotation_v; }

    CellTable & cells() { return cells_; }
    const CellTable & cells() const { return cells_; }
    uint64_t bytes() const;
    uint64_t bytes_on(const Backend * backend) const;
    // Whether all of it lies in host memory.
    bool is_host() const;
    // Copies a cell's rows of every layer into another cell. Host memory only.
    void copy_row(int64_t from, int64_t to);
    // Zeroes what is stored; the table stays.
    void clear();

  private:
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
    // n_layers]. And the committed convolution inputs, then each node's: [conv_channels, d_conv - 1
    // + n_trace, n_layers]. NULL until room was made.
    ggml_tensor * trace = nullptr;
    ggml_tensor * conv_trace = nullptr;
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

    void clear(int32_t sequence);
    // A sequence's state as bytes, device by device and layer by layer, and back.
    std::vector<uint8_t> save(int32_t sequence) const;
    void load(int32_t sequence, const std::vector<uint8_t> & bytes);
    uint64_t bytes() const;
    uint64_t trace_bytes() const;
    uint64_t bytes_on(const Backend * backend) const;
    uint64_t trace_bytes_on(const Backend * backend) const;

  private:
    template <typename Visit>
    void for_each_row(int32_t sequence, Visit && visit) const;

    RecurrentShape shape_;
    std::vector<std::unique_ptr<RecurrentPart>> parts_;
    std::vector<const RecurrentPart *> part_; // NULL for other layers
    std::vector<int64_t> index_;
};

} // namespace dfl
