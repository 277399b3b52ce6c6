// Number of compute threads on the CPU: fewer while other processes use the cores. Threads meet at
// barriers hundreds of times per token, so all wait for a thread that shares its core. On desktops
// a busy process in another session gets half of two cores, at any nice value.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <vector>

namespace dfl {

class ThreadCount {
  public:
    using Clock = std::chrono::steady_clock;
    // Function that runs on a new thread and returns true if the thread had a core to itself.
    using Probe = std::function<bool()>;

    explicit ThreadCount(int max, Probe probe = has_free_core);

    int max() const { return max_; }
    // Returns the number of threads for the next run.
    int now() const { return now_; }
    // True if probes for free cores are running; a later record_run() uses their results.
    bool is_probing() const { return !probes_.empty(); }

    // Records a run that took elapsed_ns, of which lost_ns were spent waiting for n_late threads.
    void record_run(Clock::time_point end, int64_t elapsed_ns, int64_t lost_ns, int n_late);

    // Spins for longer than the kernel lets a thread run while others wait for its core.
    static bool has_free_core();

  private:
    void lower(Clock::time_point now, int n_late);
    void probe_for_cores(Clock::time_point now);

    int max_, now_;
    Probe probe_;
    int64_t elapsed_ns_ = 0, lost_ns_ = 0;  // time of recent runs, and time lost at barriers
    std::vector<std::future<bool>> probes_; // running probes, one for each removed thread
    Clock::time_point next_probe_;
    Clock::duration pause_{};
};

} // namespace dfl
