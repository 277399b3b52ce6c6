#include "model/packed_matrix.h"

#include "device/worker_threads.h"

#include <algorithm>
#include <atomic>

namespace dfl {

void PackedMatrix::pack(const void * rows, int n_threads) const {
    // Threads take small steps: while one waits for the disk, the others take more.
    constexpr int64_t step_bytes = 1 << 20;
    const int64_t tiles = n_tiles(), row_bytes = ggml_row_size(product->type, n_in);
    const int64_t step =
        std::max<int64_t>(1, tiles * step_bytes / static_cast<int64_t>(expert_bytes()));
    const int64_t steps = (tiles + step - 1) / step;
    std::atomic<int64_t> next{0};
    auto work = [&] {
        for (int64_t i; (i = next.fetch_add(1)) < n_experts * steps;) {
            const int64_t expert = i / steps, first = i % steps * step;
            const int64_t row = expert * n_file_rows() + first_row;
            product->pack(static_cast<const char *>(rows) + row * row_bytes, n_in, n_out, first,
                          std::min(tiles, first + step), data + expert * expert_bytes());
        }
    };
    run_on_threads(std::min<int64_t>(n_threads, n_experts * steps), work);
}

} // namespace dfl
