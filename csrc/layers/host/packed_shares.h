// How threads share the work on packed weights.
#pragma once

#include <algorithm>
#include <cstdint>

namespace dfl {

// Whether parts of it are worth fetching; threads that take turns fetching parts of less have spent
// as long on fetching.
inline bool is_long_product(int64_t bytes) { return bytes >= 1 << 20; }

// Parts of weights of so many bytes that are cut between units only: enough for an even end.
inline int64_t packed_parts(int64_t bytes, int64_t n_units, int nth) {
    constexpr int64_t parts_per_thread = 16, least_bytes = 1 << 16;
    if (nth == 1 || !is_long_product(bytes)) {
        return std::min<int64_t>(nth, n_units);
    }
    return std::min({parts_per_thread * nth, bytes / least_bytes, n_units});
}

} // namespace dfl
