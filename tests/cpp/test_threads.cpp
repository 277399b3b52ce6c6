// Threads that compute a graph: distribution of work, barriers, and the number of threads.
#include "check.h"
#include "device/thread_count.h"
#include "layers/cpu_ops/cpu_node.h"

#include <array>
#include <chrono>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

using namespace dfl;
using std::chrono::milliseconds;

static void in_threads(int n, const std::function<void(int ith)> & body) {
    std::vector<std::thread> threads;
    for (int i = 1; i < n; ++i) {
        threads.emplace_back(body, i);
    }
    body(0);
    for (std::thread & thread : threads) {
        thread.join();
    }
}

// Runs of a cached graph may differ in their number of threads. No part may be skipped or done
// twice, and no thread may wait for an absent one.
static void test_runs_of_changing_teams() {
    constexpr int most = 4, n_parts = 37, n_steps = 5;
    std::mt19937 random(3);
    CpuNodes nodes;
    nodes.barrier = std::make_unique<Barrier>(most);
    nodes.shares = std::make_unique<WorkShares>(most);
    for (int run = 0; run < 400; ++run) {
        const int nth = 1 + static_cast<int>(random() % most);
        std::array<bool, n_steps> is_long;
        for (bool & one : is_long) {
            one = random() % 2 == 0;
        }
        nodes.begin_run();
        std::vector<std::atomic<int>> done(n_steps * n_parts);
        std::atomic<bool> in_order{true};
        in_threads(nth, [&](int ith) {
            for (int step = 0; step < n_steps; ++step) {
                nodes.shares->share_out(n_parts, is_long[step], ith, nth, [&](int64_t part) {
                    const int64_t before = (step - 1) * n_parts + (n_parts - 1 - part);
                    in_order = in_order && (step == 0 || done[before] == 1);
                    ++done[step * n_parts + part];
                });
                nodes.barrier->wait(ith, nth);
            }
        });
        CHECK(in_order);
        for (const std::atomic<int> & times : done) {
            CHECK(times == 1);
        }
    }
}

static void test_barrier_tells_who_was_late() {
    Barrier barrier(3);
    Barrier::Waits waits;
    // On a busy machine the two other threads may be late too, so that nobody waits: try again.
    for (int i = 0; i < 100 && waits.lost_ns < 25'000'000; ++i) {
        barrier.begin_run();
        in_threads(3, [&](int ith) {
            barrier.wait(ith, 3);
            if (ith == 1) {
                std::this_thread::sleep_for(milliseconds(30));
            }
            barrier.wait(ith, 3);
        });
        waits = barrier.waits(3);
    }
    CHECK(waits.n_late >= 1);
    CHECK(waits.lost_ns >= 25'000'000);
    barrier.begin_run();
    CHECK(barrier.waits(3).lost_ns == 0 && barrier.waits(3).n_late == 0);
}

static constexpr int64_t MS = 1'000'000;

// Records runs of 5 ms with lost_ms ms of waiting each, until `until` is true or 1 simulated
// second has passed. Returns the simulated milliseconds.
static int run_until(ThreadCount & count, ThreadCount::Clock::time_point & now, int64_t lost_ms,
                     const std::function<bool()> & until) {
    for (int ms = 0; ms < 1000; ms += 5) {
        if (until()) {
            return ms;
        }
        now += milliseconds(5);
        count.record_run(now, 5 * MS, lost_ms * MS, lost_ms > 0 ? 1 : 0);
        while (count.is_probing()) { // probes run in real time while simulated time stands still
            std::this_thread::sleep_for(std::chrono::microseconds(100));
            count.record_run(now, 0, 0, 0);
        }
    }
    return 1000;
}

static void test_count_follows_the_load() {
    std::atomic<bool> is_free{false};
    std::atomic<int> n_probes{0};
    ThreadCount count(4, [&] {
        ++n_probes;
        return is_free.load();
    });
    auto now = ThreadCount::Clock::now();
    run_until(count, now, 0, [] { return false; });
    CHECK(count.now() == 4 && n_probes == 0);

    // A single short disturbance changes nothing.
    count.record_run(now += milliseconds(8), 8 * MS, 6 * MS, 1);
    CHECK(count.now() == 4);
    run_until(count, now, 0, [] { return false; });
    CHECK(count.now() == 4 && n_probes == 0);

    // A lasting disturbance removes one thread at a time, down to one thread.
    CHECK(run_until(count, now, 4, [&] { return count.now() == 3; }) <= 50);
    run_until(count, now, 4, [] { return false; });
    CHECK(count.now() == 1);
    run_until(count, now, 0, [] { return false; });
    CHECK(count.now() == 1 && n_probes > 0 && n_probes <= 3 * 40);

    is_free = true;
    CHECK(run_until(count, now, 0, [&] { return count.now() == 4; }) <= 500);
}

static void test_no_thread_for_a_probe() {
    ThreadCount count(2, []() -> bool { throw std::runtime_error("a probe that fails"); });
    auto now = ThreadCount::Clock::now();
    run_until(count, now, 5, [&] { return count.now() == 1; });
    CHECK(count.now() == 1);
    run_until(count, now, 0, [] { return false; });
    CHECK(count.now() == 1);
}

int main() {
    test_runs_of_changing_teams();
    test_barrier_tells_who_was_late();
    test_count_follows_the_load();
    test_no_thread_for_a_probe();
}
