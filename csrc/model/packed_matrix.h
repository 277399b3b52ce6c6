// A matrix of weights in the form that our own CPU kernels multiply with.
#pragma once

#include "cpu/packed_product.h"

#include <string>

namespace dfl {

struct PackedMatrix {
    const cpu::PackedProduct * product = nullptr;
    int64_t n_in = 0, n_out = 0;
    int64_t n_experts = 1; // matrices of this size, one after the other
    char * data = nullptr; // bytes() of them
    std::string name = {}; // of the tensor in the file

    size_t bytes() const { return n_experts * expert_bytes(); }
    size_t expert_bytes() const { return product->packed_size(n_in, n_out); }
    const char * expert(int64_t i) const { return data + i * expert_bytes(); }
    int64_t n_tiles() const { return (n_out + product->tile - 1) / product->tile; }
    // rows: n_out rows of each matrix, as ggml stores them.
    void pack(const void * rows, int n_threads) const;
};

} // namespace dfl
