// run_on_threads() does all work even if the system starts few threads.
#include "check.h"
#include "device/worker_threads.h"
#include "model/quantize.h"

#include <atomic>
#include <new>
#include <system_error>
#include <vector>

using namespace dfl;

namespace {

int threads_of(int64_t n, int n_given, bool no_memory = false) {
    std::atomic<int> n_work{0}, next{0}, done{0};
    int n_started = 0;
    run_on_threads(
        n,
        [&] {
            ++n_work;
            while (next++ < 1000) {
                ++done;
            }
        },
        [&](const std::function<void()> & work) {
            if (n_started == n_given) {
                if (no_memory) {
                    throw std::bad_alloc();
                }
                throw std::system_error(EAGAIN, std::generic_category());
            }
            ++n_started;
            return std::thread(work);
        });
    CHECK(done == 1000);
    CHECK(n_work == n_started + 1);
    return n_work;
}

void quantizes_no_rows() {
    float row[32] = {};
    char dst[64];
    quantize("q8_0", row, 0, 32, dst, sizeof dst, 4);
}

} // namespace

int main() {
    CHECK(threads_of(0, 9) == 1);
    CHECK(threads_of(1, 9) == 1);
    CHECK(threads_of(4, 9) == 4);
    CHECK(threads_of(4, 2) == 3);
    CHECK(threads_of(4, 0) == 1);
    CHECK(threads_of(4, 1, /*no_memory =*/true) == 2);
    quantizes_no_rows();
}
