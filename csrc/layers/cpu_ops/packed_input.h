// What products with packed weights have in common: their rows, quantised by a node of its own or
// by each thread for itself; what follows a product; how threads share the work.
#pragma once

#include "cpu/matmul/packed_product.h"
#include "layers/cpu_ops/rows.h"

#include <algorithm>
#include <vector>

namespace dfl {

struct Linear;

// Bytes in whole cache lines, so that no two threads write to one.
inline int64_t whole_lines(int64_t bytes) {
    constexpr int64_t line = 64;
    return (bytes + line - 1) / line * line;
}

class PackedInput {
  public:
    // Adds a node that quantises where that is better done once.
    PackedInput(GraphContext & g, const cpu::PackedProduct & product, const Rows & x);
    // Rows that a node has quantised for this product, of `width` values.
    PackedInput(const cpu::PackedProduct & product, ggml_tensor * quantized, int64_t width,
                int64_t n_rows);

    int64_t n_rows() const { return n_rows_; }
    int64_t width() const { return width_; }
    // What a node that takes it reads, before all else.
    const std::vector<ggml_tensor *> & sources() const { return sources_; }
    // Bytes of a thread.
    int64_t scratch_size() const;
    // The rows, for a node that computes dst. scratch: this thread's.
    const char * quantized(const ggml_tensor * dst, char * scratch) const;

  private:
    const cpu::PackedProduct * product_;
    Rows rows_;
    bool alone_ = false; // each thread quantises
    int64_t width_, n_rows_;
    std::vector<ggml_tensor *> sources_;
};

// y * scale + bias for outputs [first, first + n) of some rows, which are `stride` floats apart; y
// is where output `first` of the first row lies. expert: of a stack of matrices.
void finish_outputs(const Linear & l, int64_t expert, int64_t first, int64_t n, float * y,
                    int64_t n_rows, int64_t stride);

// Whether parts of the work are worth fetching; threads that take turns fetching parts of less have
// spent as long on fetching.
inline bool is_long_product(int64_t bytes) { return bytes >= 1 << 20; }

// Parts of weights of so many bytes that are cut between units only: enough for an even end.
inline int64_t packed_parts(int64_t bytes, int64_t n_units, int nth) {
    constexpr int64_t parts_per_thread = 16, min_bytes = 1 << 16;
    if (nth == 1 || !is_long_product(bytes)) {
        return std::min<int64_t>(nth, n_units);
    }
    return std::min({parts_per_thread * nth, bytes / min_bytes, n_units});
}

} // namespace dfl
