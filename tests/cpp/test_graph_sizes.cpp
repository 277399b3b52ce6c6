// Sizes of graphs: never too small, close on a CPU, few on a GPU.
#include "check.h"
#include "device/devices.h"
#include "graph/graph_sizes.h"
#include "model/weights.h"

#include <functional>
#include <set>

using namespace dfl;

namespace {

constexpr int64_t MOST_ROWS = 256, N_CELLS = 40000;

// How many sizes serve 1 to n; each at least what was asked for and at most so many times it, and
// none below that of a smaller request.
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
    Devices gpu(cpu_device(), {}, 1, {}, DFL_MEASURE_CUDA);
    Devices split(cpu_device(), {/*first =*/2, 0}, 1, {}, DFL_MEASURE_CUDA);
    const GraphSizes close(cpu), few(gpu), beside(split);

    CHECK(close.injected(0) == 0);
    CHECK(few.injected(0) == 0);
    CHECK(few.injected(1) == few.injected(16));
    for (int64_t n = 1; n <= 16; ++n) {
        CHECK(close.path(n) == n);
        CHECK(beside.path(n) == n); // what the CPU computes of a split is worth a graph
    }
    CHECK(n_sizes(16, 1.5, [&](int64_t n) { return few.path(n); }) == 8);
    CHECK(n_sizes(MOST_ROWS, 1.5, [&](int64_t n) { return few.verify_rows(n, weights); }) <= 16);
    CHECK(n_sizes(MOST_ROWS, 1.34, [&](int64_t n) { return close.verify_rows(n, weights); }) > 64);
    for (const int64_t high : {1, 255, 1024, 1025, 5000, 39999, 40000}) {
        CHECK(close.cells(high, N_CELLS, true) >= high);
        CHECK(few.cells(high, N_CELLS, true) >= close.cells(high, N_CELLS, true));
        CHECK(few.cells(high, N_CELLS, true) <= N_CELLS);
        CHECK(few.cells(high, N_CELLS, true) <= high + 1024 + high / 4);
    }
    return 0;
}
