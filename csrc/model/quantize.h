// ggml's reference quantisers, for the converter.
#pragma once

#include <cstdint>
#include <ggml.h>
#include <string>

namespace dfl {

// A type by ggml's name for it ("q8_0", "q4_K"); throws DFL_STATUS_ARGUMENT on any other.
ggml_type type_from_name(const std::string & name);

// Bytes of one row; throws on an unknown type or a row length the type cannot hold.
uint64_t quantized_row_size(const std::string & type_name, int64_t n_per_row);

// src: [n_rows][n_per_row] float32. Rows are shared out over n_threads (<= 0: one per core).
void quantize(const std::string & type_name, const float * src, int64_t n_rows, int64_t n_per_row,
              void * dst, uint64_t dst_size, int n_threads);

} // namespace dfl
