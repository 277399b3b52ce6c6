// Products of weights with rows of float32 on this CPU. One row is bound by the memory's bandwidth;
// these kernels unpack a weight once for many rows, so that a verify of 8 rows costs hardly more.
// Quantised weights are kept in tiles: a vector register holds 4 inputs of every output of the
// tile, and no sum ever crosses its lanes. Floats, and types without kernels of ours, stay as they
// lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ggml.h>
#include <string>

namespace dfl::cpu {

// A way to multiply weights of one ggml type, in tiles of rows, with rows of float32.
struct PackedProduct {
    const char * set; // instruction set: "avx512vnni"
    ggml_type type;   // type of the weights
    int tile;         // weight rows (outputs) of a tile: 16 or 8
    int block;        // inputs that are quantised together; n_in is a multiple of it

    // Bytes of the packed form of [n_in, n_out]; 0 where the shape does not fit.
    size_t (*packed_size)(int64_t n_in, int64_t n_out);

    // Rearranges tiles [first_tile, last_tile) of rows stored as ggml does. rows and packed point
    // to the whole tensors. A last partial tile is padded with zero rows.
    void (*pack)(const void * rows, int64_t n_in, int64_t n_out, int64_t first_tile,
                 int64_t last_tile, void * packed);

    // Bytes of a row of x, quantised to the values ggml quantises it to for this type.
    size_t (*quantized_row_size)(int64_t n_in);
    void (*quantize_row)(const float * x, int64_t n_in, void * dst);

    // dst[r * dst_stride + o] for rows r in [0, n_rows) and outputs o of tiles
    // [first_tile, last_tile) up to n_out. x: n_rows quantised rows, one after the other. Every
    // output is summed in one order whatever n_rows, tiles or threads are: equal inputs give equal
    // bits.
    void (*multiply)(const void * packed, int64_t n_in, int64_t n_out, const void * x,
                     int64_t n_rows, int64_t first_tile, int64_t last_tile, float * dst,
                     int64_t dst_stride);

    bool in_place; // the packed form is the rows as ggml stores them, at any address

    // "q8_0 avx512vnni"
    std::string name() const;
};

// The best one for this type on this CPU, or NULL.
const PackedProduct * packed_product(ggml_type type);
// The best one that takes the weights as ggml stores them.
const PackedProduct * product_in_place(ggml_type type);

} // namespace dfl::cpu
