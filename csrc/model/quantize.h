// Quantisation by ggml's reference quantisers, for the converter.
#pragma once

#include <cstdint>
#include <ggml.h>
#include <string>

namespace dfl {

// Returns the type of ggml's name ("q8_0", "q4_K"). Throws DFL_STATUS_ARGUMENT if there is none.
ggml_type type_from_name(const std::string & name);

// Returns the bytes of a row. Throws if the type is unknown or cannot hold the row length.
uint64_t quantized_row_size(const std::string & type_name, int64_t n_per_row);

// Quantises src, float32 [n_rows][n_per_row], on n_threads threads (<= 0: one per core).
void quantize(const std::string & type_name, const float * src, int64_t n_rows, int64_t n_per_row,
              void * dst, uint64_t dst_size, int n_threads);

} // namespace dfl
