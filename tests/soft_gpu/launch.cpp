#include "launch.h"

#include "access_counts.h"
#include "crash.h"
#include "memory_check.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <thread>
#ifdef __SSE__
#include <immintrin.h>
#endif

namespace soft_gpu {

namespace {

// Flushes denormal floats to zero during its lifetime, as kernels compiled with .ftz do.
class DenormalMode {
  public:
    explicit DenormalMode([[maybe_unused]] bool flushes) {
#ifdef __SSE__
        saved_ = _mm_getcsr();
        _mm_setcsr(flushes ? saved_ | 0x8040 : saved_ & ~0x8040u);
#endif
    }
    ~DenormalMode() {
#ifdef __SSE__
        _mm_setcsr(saved_);
#endif
    }
    DenormalMode(const DenormalMode &) = delete;
    DenormalMode & operator=(const DenormalMode &) = delete;

  private:
    [[maybe_unused]] u32 saved_ = 0;
};

void check(const Launch & launch) {
    const Kernel & kernel = *launch.kernel;
    const u32 * grid = launch.grid;
    const auto refuse = [&](bool is_right, const std::string & why) {
        require(is_right, kernel.name + ": " + why);
    };
    refuse(launch.parameters.size() == kernel.parameter_bytes, "arguments of another size");
    refuse(launch.n_threads() > 0 && launch.n_threads() <= MAX_BLOCK_THREADS &&
               launch.block[2] <= 64,
           "a block of " + std::to_string(launch.n_threads()) + " threads");
    refuse(kernel.max_threads == 0 || launch.n_threads() <= kernel.max_threads,
           "more threads than its launch bounds");
    refuse(launch.n_blocks() > 0 && grid[1] <= 65535 && grid[2] <= 65535, "a grid of this size");
    refuse(kernel.shared_bytes + launch.dynamic_bytes <= MAX_SHARED_BYTES,
           std::to_string(kernel.shared_bytes + launch.dynamic_bytes) + " bytes of shared memory");
}

using Clock = std::chrono::steady_clock;

// Runs blocks in the order of their index, until all are taken or a time has come. A block may wait
// for earlier ones.
void run_blocks(const Launch & launch, std::atomic<u64> & next, Clock::time_point end) {
    const DenormalMode mode(launch.kernel->flushes_denormals);
    const CrashReport report(*launch.kernel);
    const AccessCounter counter(*launch.kernel);
    Block block(launch);
    while (Clock::now() < end) {
        const u64 index = next++;
        if (index >= launch.n_blocks()) {
            return;
        }
        block.start(index);
        while (!block.step()) {
        }
    }
}

// Blocks of a cooperative launch wait for each other, so that all are resident and run in turn.
void run_together(const Launch & launch) {
    const DenormalMode mode(launch.kernel->flushes_denormals);
    const CrashReport report(*launch.kernel);
    const AccessCounter counter(*launch.kernel);
    alignas(256) u8 workspace[256] = {};
    allow_memory(workspace, sizeof(workspace));
    std::vector<std::unique_ptr<Block>> blocks;
    for (u64 index = 0; index < launch.n_blocks(); ++index) {
        blocks.push_back(std::make_unique<Block>(launch, reinterpret_cast<u64>(workspace)));
        blocks.back()->start(index);
    }
    while (!blocks.empty()) {
        blocks.erase(std::remove_if(blocks.begin(), blocks.end(),
                                    [](const auto & block) { return block->step(); }),
                     blocks.end());
    }
    forbid_memory(workspace);
}

} // namespace

void run(const Launch & launch) {
    check(launch);
    if (launch.is_cooperative) {
        run_together(launch);
        return;
    }
    std::atomic<u64> next{0};
    std::exception_ptr failure;
    std::mutex mutex;
    const auto work = [&](Clock::time_point end) {
        try {
            run_blocks(launch, next, end);
        } catch (...) {
            const std::lock_guard<std::mutex> lock(mutex);
            failure = failure != nullptr ? failure : std::current_exception();
            next = launch.n_blocks();
        }
    };
    work(Clock::now() + std::chrono::microseconds(settings().alone_us));
    if (next >= launch.n_blocks() && failure == nullptr) {
        return;
    }
    std::vector<std::thread> others;
    for (u64 i = 1; i < settings().n_threads && next + i < launch.n_blocks(); ++i) {
        others.emplace_back(work, Clock::time_point::max());
    }
    work(Clock::time_point::max());
    for (std::thread & other : others) {
        other.join();
    }
    if (failure != nullptr) {
        std::rethrow_exception(failure);
    }
}

} // namespace soft_gpu
