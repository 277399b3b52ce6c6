// A weight matrix, or the matrices of all experts, in the form of our own CPU kernels.
#pragma once

#include "cpu/matmul/packed_product.h"

#include <string>

namespace dfl {

struct PackedMatrix {
    const cpu::PackedProduct * product = nullptr;
    int64_t n_in = 0, n_out = 0;
    int64_t n_experts = 1;
    int64_t first_row = 0; // first row to pack of each matrix in the file
    int64_t file_rows = 0; // number of rows of each matrix in the file; 0: n_out
    size_t stride = 0;     // bytes from one matrix to the next; 0: expert_bytes()
    char * data = nullptr;
    std::string name = {};

    size_t bytes() const { return n_experts * expert_bytes(); }
    size_t expert_bytes() const { return product->packed_size(n_in, n_out); }
    const char * expert(int64_t i) const {
        return data + i * (stride != 0 ? stride : expert_bytes());
    }
    int64_t n_file_rows() const { return file_rows != 0 ? file_rows : n_out; }
    int64_t n_tiles() const { return (n_out + product->tile - 1) / product->tile; }
    // Packs the weights `rows`, in ggml's layout, with n_file_rows() rows for each matrix.
    void pack(const void * rows, int n_threads) const;
};

} // namespace dfl
