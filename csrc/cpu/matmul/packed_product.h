// Products of weights with float32 rows. One row is limited by memory bandwidth; kernels unpack a
// weight once for many rows, so that a verify of 8 rows costs little more. Quantised weights are
// packed in tiles: a vector holds 4 inputs of every output, and no sum crosses lanes. Float
// weights, and types without kernels here, stay as ggml stores them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ggml.h>
#include <string>

namespace dfl::cpu {

// Functions that multiply weights of one ggml type with rows of float32.
struct PackedProduct {
    const char * set; // instruction set, such as "avx512vnni"
    ggml_type type;
    int tile;  // weight rows (outputs) of a tile: 16 or 8
    int block; // inputs that are quantised together; n_in is a multiple of it

    // Returns the bytes of packed weights [n_in, n_out]; 0 if the shape is not supported.
    size_t (*packed_size)(int64_t n_in, int64_t n_out);

    // Packs tiles [first_tile, last_tile). rows (as ggml stores them) and packed point to the whole
    // tensors. A partial last tile is padded with zero rows.
    void (*pack)(const void * rows, int64_t n_in, int64_t n_out, int64_t first_tile,
                 int64_t last_tile, void * packed);

    // Returns the bytes of a row of x that quantize_row() writes, with the same values as ggml.
    size_t (*quantized_row_size)(int64_t n_in);
    void (*quantize_row)(const float * x, int64_t n_in, void * dst);

    // Computes dst[r * dst_stride + o] for rows r < n_rows and outputs o < n_out of tiles
    // [first_tile, last_tile). x: n_rows contiguous quantised rows. The order of an output's sum is
    // always the same: equal inputs give equal bits.
    void (*multiply)(const void * packed, int64_t n_in, int64_t n_out, const void * x,
                     int64_t n_rows, int64_t first_tile, int64_t last_tile, float * dst,
                     int64_t dst_stride);

    bool in_place; // true if packed weights are as ggml stores them, at any address

    // Returns type and instruction set, such as "q8_0 avx512vnni".
    std::string name() const;
};

// Returns the best product for a weight type on this CPU, or NULL.
const PackedProduct * packed_product(ggml_type type);
// Returns the best product that reads weights as ggml stores them, or NULL.
const PackedProduct * product_in_place(ggml_type type);

} // namespace dfl::cpu
