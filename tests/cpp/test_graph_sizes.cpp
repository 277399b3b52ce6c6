// Bucketed graph sizes: never below the request, exact or close on CPUs, few on GPUs.
#include "check.h"
#include "device/devices.h"
#include "graph/graph_sizes.h"
#include "model/weights.h"

#include <functional>
#include <set>

using namespace dfl;

namespace {

constexpr int64_t MOST_ROWS = 256, N_CELLS = 40000;

// Returns the number of distinct sizes for requests of 1 to n. Checks that sizes grow with
// requests, and are at most `most` times the request.
int64_t n_sizes(int64_t n, double most, const std::function<int64_t(int64_t)> & size_of) {
    std::set<int64_t> sizes;
    int64_t before = 0;
    for (int64_t asked = 1; asked <= n; ++asked) {
        const int64_t size = size_of(asked);
        CHECK(size >= asked);
        CHECK(size >= before);
        CHECK(static_cast<double>(size) <= most * static_cast<double>(asked));
        sizes.insert(size);
        before = size;
    }
    return static_cast<int64_t>(sizes.size());
}

} // namespace

int main() {
    const Weights weights;
    Devices cpu(cpu_device(), {}, 1, {});
    Devices gpu(cpu_device(), {}, 1, {}, DFL_DRY_RUN_CUDA);
    Devices split(cpu_device(), {/*first =*/2, 0}, 1, {}, DFL_DRY_RUN_CUDA);
    const GraphSizes close(cpu, 16), beside(split, 16), alone(gpu, 1), few(gpu, 16);

    CHECK(close.inject_rows(5) == 5);
    CHECK(alone.inject_rows(1) == alone.inject_rows(16));
    CHECK(few.inject_rows(1) == few.inject_rows(64));
    CHECK(n_sizes(MOST_ROWS, 64.0, [&](int64_t n) { return few.inject_rows(n); }) <= 3);
    for (int64_t n = 1; n <= 16; ++n) {
        CHECK(close.promote_steps(n) == n);
        CHECK(beside.promote_steps(n) == n);
    }
    CHECK(n_sizes(16, 1.5, [&](int64_t n) { return alone.promote_steps(n); }) == 8);
    CHECK(n_sizes(16, 4.0, [&](int64_t n) { return few.promote_steps(n); }) == 3);
    const auto verified = [&](const GraphSizes & sizes) {
        return [&](int64_t n) { return sizes.verify_rows(n, weights); };
    };
    CHECK(n_sizes(MOST_ROWS, 1.5, verified(alone)) <= 22);
    CHECK(n_sizes(MOST_ROWS, 1.5, verified(few)) <= 20);
    for (int64_t n = 32; n <= MOST_ROWS; ++n) {
        CHECK(4 * alone.verify_rows(n, weights) <= 5 * n);
        CHECK(n <= 64 || 4 * few.verify_rows(n, weights) <= 5 * n);
    }
    CHECK(n_sizes(MOST_ROWS, 32.0, [&](int64_t n) { return few.mixed_verify_rows(n); }) <= 10);
    CHECK(n_sizes(MOST_ROWS, 1.5, [&](int64_t n) { return alone.draft_rows(n); }) <= 20);
    CHECK(n_sizes(MOST_ROWS, 16.0, [&](int64_t n) { return few.draft_rows(n); }) <= 11);
    CHECK(n_sizes(MOST_ROWS, 8.0, [&](int64_t n) { return few.lane_rows(n); }) <= 10);
    CHECK(n_sizes(MOST_ROWS, 1.5, [&](int64_t n) { return alone.lane_rows(n); }) <= 16);
    for (int64_t n = 1; n <= MOST_ROWS; ++n) {
        CHECK(close.mixed_verify_rows(n) == n);
        CHECK(close.draft_rows(n) == n);
        CHECK(close.lane_rows(n) == n);
        CHECK(close.chunk_lane_rows(n) == n);
    }
    CHECK(n_sizes(MOST_ROWS, 1.34, verified(close)) > 64);
    // Appended rows: one prompt piece, one piece beside single rows, and several pieces.
    const auto of_piece = [](const GraphSizes & sizes, int64_t n_single) {
        return [&sizes, n_single](int64_t n) { return sizes.append_rows(n_single, {n}); };
    };
    CHECK(n_sizes(512, 32.0, of_piece(few, 0)) <= 9);
    CHECK(n_sizes(512, 33.0, of_piece(few, 1)) <= 9);
    for (int64_t n_single = 2; n_single <= 16; ++n_single) {
        CHECK(few.append_rows(n_single, {100}) == 16 + 128);
        CHECK(few.append_rows(n_single, {60, 40}) == 16 + 128);
        CHECK(close.append_rows(n_single, {60, 40}) == n_single + 100);
    }
    CHECK(few.append_rows(3, {}) == 4);
    CHECK(GraphSizes(gpu, 12).append_rows(9, {}) == 12);
    CHECK(close.append_rows(9, {}) == 9);
    CHECK(n_sizes(N_CELLS, 8192.0, [&](int64_t n) { return few.shared_cells(n); }) <= 8);
    RecentMax most;
    CHECK(most(5) == 5);
    CHECK(most(3) == 5);
    int64_t n_kept = 0;
    while (most(3) == 5) {
        ++n_kept;
    }
    CHECK(n_kept > 500);
    CHECK(n_kept < 1100);
    for (const int64_t high : {1, 255, 1024, 1025, 5000, 39999, 40000}) {
        CHECK(close.cells(high, N_CELLS, true) >= high);
        CHECK(few.cells(high, N_CELLS, true) >= close.cells(high, N_CELLS, true));
        CHECK(few.cells(high, N_CELLS, true) <= N_CELLS);
        CHECK(few.cells(high, N_CELLS, true) <= high + 1024 + high / 4);
    }
    return 0;
}
