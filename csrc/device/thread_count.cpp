#include "device/thread_count.h"

#include <algorithm>
#include <system_error>

#if defined(__unix__) || defined(__APPLE__)
#include <time.h>
#endif

namespace dfl {

namespace {

using std::chrono::milliseconds;

// Window in ns over which lost time is measured: a process that runs for a few ms is ignored.
constexpr int64_t WINDOW_NS = 50'000'000;
// Share of time lost at barriers above which threads are removed: a shared core loses half or more.
constexpr double MAX_LOST = 0.25;
// Time between probes for free cores, doubled each time; most disturbances are short.
constexpr milliseconds FIRST_PAUSE{50}, LONGEST_PAUSE{400};
// CPU time in ns that a probe must get undisturbed. A thread that has just woken up may run for 4
// ms undisturbed on a core that it shares with a busy process.
constexpr int64_t CALM_CPU_NS = 10'000'000;
// Time in ns without CPU after which a thread counts as sharing its core.
constexpr int64_t DISTURBED_NS = 1'000'000;

#if defined(__unix__) || defined(__APPLE__)
int64_t clock_ns(clockid_t clock) {
    timespec time = {};
    clock_gettime(clock, &time);
    return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
}
#endif

} // namespace

bool ThreadCount::has_free_core() {
#if defined(__unix__) || defined(__APPLE__)
    const int64_t wall_before = clock_ns(CLOCK_MONOTONIC);
    const int64_t cpu_before = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    int64_t cpu = 0, wall = 0;
    do {
        cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu_before;
        wall = clock_ns(CLOCK_MONOTONIC) - wall_before;
    } while (cpu < CALM_CPU_NS && wall - cpu < DISTURBED_NS);
    return cpu >= CALM_CPU_NS;
#else
    return true;
#endif
}

ThreadCount::ThreadCount(int max, Probe probe) : max_(max), now_(max), probe_(std::move(probe)) {}

void ThreadCount::record_run(Clock::time_point end, int64_t elapsed_ns, int64_t lost_ns,
                             int n_late) {
    elapsed_ns_ += elapsed_ns;
    lost_ns_ += lost_ns;
    const double window = static_cast<double>(std::max(elapsed_ns_, WINDOW_NS));
    if (now_ > 1 && n_late > 0 && static_cast<double>(lost_ns_) > MAX_LOST * window) {
        lower(end, n_late);
    } else if (now_ < max_) {
        probe_for_cores(end);
    } else if (elapsed_ns_ > WINDOW_NS) {
        const double share = static_cast<double>(WINDOW_NS) / static_cast<double>(elapsed_ns_);
        elapsed_ns_ = WINDOW_NS;
        lost_ns_ = static_cast<int64_t>(static_cast<double>(lost_ns_) * share);
        if (lost_ns_ == 0) {
            pause_ = {};
        }
    }
}

void ThreadCount::lower(Clock::time_point now, int n_late) {
    now_ = std::max(1, now_ - n_late);
    elapsed_ns_ = lost_ns_ = 0;
    // Doubles the pause before the next probes, as recent probes wrongly found free cores.
    pause_ = std::clamp<Clock::duration>(2 * pause_, FIRST_PAUSE, LONGEST_PAUSE);
    next_probe_ = now + pause_;
}

void ThreadCount::probe_for_cores(Clock::time_point now) {
    if (!probes_.empty()) {
        const auto is_done = [](const std::future<bool> & probe) {
            return probe.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
        };
        if (!std::all_of(probes_.begin(), probes_.end(), is_done)) {
            return;
        }
        int n_free = 0;
        for (std::future<bool> & probe : probes_) {
            try {
                n_free += probe.get() ? 1 : 0;
            } catch (const std::exception &) { // a probe that throws counts as no free core
            }
        }
        probes_.clear();
        elapsed_ns_ = lost_ns_ = 0;
        now_ += n_free;
        pause_ = std::min<Clock::duration>(2 * pause_, LONGEST_PAUSE);
        next_probe_ = now + pause_;
    } else if (now >= next_probe_) {
        try {
            for (int i = now_; i < max_; ++i) {
                probes_.push_back(std::async(std::launch::async, probe_));
            }
        } catch (const std::system_error &) {
            next_probe_ = now + pause_; // the system cannot start a thread for a probe now
        }
    }
}

} // namespace dfl
