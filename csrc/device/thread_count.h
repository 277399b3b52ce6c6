// How many threads compute on the CPU: fewer while other processes hold cores.
//
// Threads that meet at a barrier some hundred times a token are as fast as the one that waits for a
// core. Where the kernel shares cores out by session, as desktops do, a single busy process in
// another terminal gets as much of two cores as two threads here, whatever its nice value: a model
// of 135M fell from 197 to 16 tokens/s beside one, and one thread alone kept 111.
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
    // Runs on a thread of its own: whether that thread had a core to itself.
    using Probe = std::function<bool()>;

    explicit ThreadCount(int max, Probe probe = has_free_core);

    int max() const { return max_; }
    // For the next run.
    int now() const { return now_; }
    // True if probes run, whose answers a later note() takes.
    bool is_probing() const { return !probes_.empty(); }

    // After a run that ended at `end` and took `elapsed_ns`, of which its threads spent lost_ns
    // waiting for n_late of them that came late.
    void record_run(Clock::time_point end, int64_t elapsed_ns, int64_t lost_ns, int n_late);

    // Spins for a few milliseconds, longer than the kernel lets a thread run where others wait for
    // its core.
    static bool has_free_core();

  private:
    void lower(Clock::time_point now, int n_late);
    void probe_for_cores(Clock::time_point now);

    int max_, now_;
    Probe probe_;
    int64_t elapsed_ns_ = 0, lost_ns_ = 0;  // of the last runs
    std::vector<std::future<bool>> probes_; // one for each thread that could come back
    Clock::time_point next_probe_;
    Clock::duration pause_{};
};

} // namespace dfl
