#include "packed_matrix.h"

#include "worker_threads.h"

#include <algorithm>
#include <atomic>

namespace dfl {

void PackedMatrix::pack(const void * rows, int n_threads) const {
    // Small steps: a thread may wait for the disk.
    constexpr int64_t step_bytes = 1 << 20;
    const int64_t tiles = n_tiles();
    const int64_t step = std::max<int64_t>(1, tiles * step_bytes / (int64_t)bytes());
    std::atomic<int64_t> next{0};
    auto work = [&] {
        for (int64_t first; (first = next.fetch_add(step)) < tiles;) {
            product->pack(rows, n_in, n_out, first, std::min(tiles, first + step), data);
        }
    };
    const int64_t steps = (tiles + step - 1) / step;
    run_on_threads(std::min<int64_t>(n_threads, steps), work);
}

} // namespace dfl
