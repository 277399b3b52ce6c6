// A matrix of weights in the form that our own CPU kernels multiply with.
#pragma once

#include "cpu/matmul/packed_product.h"

#include <string>

namespace dfl {

struct PackedMatrix {
    const cpu::PackedProduct * product = nullptr;
    int64_t n_in = 0, n_out = 0;
    int64_t n_experts = 1; // matrices of this size
    int64_t first_row = 0; // of each of them in the file, where a tensor holds more rows
    int64_t file_rows = 0; // of each matrix of the tensor; 0: n_out
    size_t stride = 0;     // bytes from one matrix to the next; 0: expert_bytes()
    char * data = nullptr;
    std::string name = {}; // of the tensor in the file

    size_t bytes() const { return n_experts * expert_bytes(); }
    size_t expert_bytes() const { return product->packed_size(n_in, n_out); }
    const char * expert(int64_t i) const {
        return data + i * (stride != 0 ? stride : expert_bytes());
    }
    int64_t n_file_rows() const { return file_rows != 0 ? file_rows : n_out; }
    int64_t n_tiles() const { return (n_out + product->tile - 1) / product->tile; }
    // rows: n_file_rows() rows of each matrix, as ggml stores them.
    void pack(const void * rows, int n_threads) const;
};

} // namespace dfl
