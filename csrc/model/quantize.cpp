#include "model/quantize.h"

#include "device/registry.h"
#include "device/worker_threads.h"
#include "error.h"

#include <algorithm>
#include <atomic>
#include <ggml.h>

namespace dfl {

ggml_type type_from_name(const std::string & name) {
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const auto type = static_cast<ggml_type>(i);
        const char * names = ggml_type_name(type);
        if (names != nullptr && name == names && ggml_blck_size(type) > 0) {
            return type;
        }
    }
    throw Error(DFL_STATUS_ARGUMENT, format("tensor type %s: ggml has no such type", name.c_str()));
}

static uint64_t row_size(ggml_type type, int64_t n_per_row) {
    const int64_t block = ggml_blck_size(type);
    DFL_CHECK(n_per_row > 0 && n_per_row % block == 0, DFL_STATUS_ARGUMENT,
              "rows have %lld values, type %s needs a positive multiple of %lld",
              (long long)n_per_row, ggml_type_name(type), (long long)block);
    return ggml_row_size(type, n_per_row);
}

uint64_t quantized_row_size(const std::string & type_name, int64_t n_per_row) {
    return row_size(type_from_name(type_name), n_per_row);
}

void quantize(const std::string & type_name, const float * src, int64_t n_rows, int64_t n_per_row,
              void * dst, uint64_t dst_size, int n_threads) {
    const ggml_type type = type_from_name(type_name);
    const uint64_t bytes = row_size(type, n_per_row);
    DFL_CHECK(n_rows >= 0 && dst_size / bytes >= static_cast<uint64_t>(n_rows), DFL_STATUS_ARGUMENT,
              "%lld rows of %llu bytes do not fit into %llu bytes", (long long)n_rows,
              (unsigned long long)bytes, (unsigned long long)dst_size);
    DFL_CHECK(!ggml_quantize_requires_imatrix(type), DFL_STATUS_ARGUMENT,
              "tensor type %s needs an importance matrix", ggml_type_name(type));
    const bool supported = ggml_is_quantized(type) || type == GGML_TYPE_F16 ||
                           type == GGML_TYPE_BF16 || type == GGML_TYPE_F32;
    DFL_CHECK(supported, DFL_STATUS_ARGUMENT,
              "tensor type %s is not a type to which values can be quantised",
              ggml_type_name(type));

    ggml_quantize_init(type); // builds ggml's tables once, under ggml's lock
    int64_t n = n_threads > 0 ? n_threads : default_threads();
    // Starting a thread costs more than quantising a few thousand values.
    n = std::max<int64_t>(1, std::min({n, n_rows, 1 + n_rows * n_per_row / 65536}));
    const int64_t share = (n_rows + n - 1) / n;
    std::atomic<int64_t> next{0};
    run_on_threads(n, [&] {
        for (int64_t first; (first = next.fetch_add(share)) < n_rows;) {
            ggml_quantize_chunk(type, src, dst, first * n_per_row, std::min(share, n_rows - first),
                                n_per_row, nullptr);
        }
    });
}

} // namespace dfl
