// x as packed products take it: quantised by a node of its own, or by each thread for itself.
#pragma once

#include "layers/host/packed_rows.h"

#include <vector>

namespace dfl {

// Bytes in whole cache lines, so that no two threads write to one.
inline int64_t whole_lines(int64_t bytes) {
    constexpr int64_t line = 64;
    return (bytes + line - 1) / line * line;
}

class PackedInput {
  public:
    // Adds a node that quantises where that is better done once.
    PackedInput(Build & b, const cpu::PackedProduct & product, ggml_tensor * x);
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
    PackedRows rows_;
    bool alone_ = false; // each thread quantises
    int64_t width_, n_rows_;
    std::vector<ggml_tensor *> sources_;
};

} // namespace dfl
