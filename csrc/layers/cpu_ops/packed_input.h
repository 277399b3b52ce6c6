// Common parts of packed products: quantised input, scale and bias of outputs, division of work.
#pragma once

#include "cpu/matmul/packed_product.h"
#include "layers/cpu_ops/rows.h"

#include <algorithm>
#include <vector>

namespace dfl {

struct Linear;

// Rounds bytes up to whole cache lines, so that no two threads write to the same line.
inline int64_t whole_lines(int64_t bytes) {
    constexpr int64_t line = 64;
    return (bytes + line - 1) / line * line;
}

// Input rows of a packed product, quantised once by a node or by each thread for itself.
class PackedInput {
  public:
    // Adds a node that quantises x for `product`, unless each thread should quantise for itself.
    PackedInput(GraphContext & g, const cpu::PackedProduct & product, const Rows & x);
    // Takes n_rows rows of `width` values that a node has already quantised for `product`.
    PackedInput(const cpu::PackedProduct & product, ggml_tensor * quantized, int64_t width,
                int64_t n_rows);

    int64_t n_rows() const { return n_rows_; }
    int64_t width() const { return width_; }
    // Returns the tensors that a node which multiplies this input must have as its first sources.
    const std::vector<ggml_tensor *> & sources() const { return sources_; }
    int64_t scratch_size() const;
    // Returns the quantised rows for the node that computes dst. scratch: memory of this thread.
    const char * quantized(const ggml_tensor * dst, char * scratch) const;

  private:
    const cpu::PackedProduct * product_;
    Rows rows_;
    bool alone_ = false; // true: each thread quantises for itself
    int64_t width_, n_rows_;
    std::vector<ggml_tensor *> sources_;
};

// Applies the scale and bias of one expert (0 for a single matrix) to outputs [first, first + n) of
// n_rows rows, `stride` floats apart. y points to output `first` of the first row.
void finish_outputs(const Linear & l, int64_t expert, int64_t first, int64_t n, float * y,
                    int64_t n_rows, int64_t stride);

// True if a product reads enough bytes of weights for idle threads to take over work of others. For
// fewer bytes, that costs as much time as it saves.
inline bool is_long_product(int64_t bytes) { return bytes >= 1 << 20; }

// Returns into how many parts, at most n_units, to divide a product so that threads end together.
inline int64_t packed_parts(int64_t bytes, int64_t n_units, int nth) {
    constexpr int64_t parts_per_thread = 16, min_bytes = 1 << 16;
    if (nth == 1 || !is_long_product(bytes)) {
        return std::min<int64_t>(nth, n_units);
    }
    return std::min({parts_per_thread * nth, bytes / min_bytes, n_units});
}

} // namespace dfl
