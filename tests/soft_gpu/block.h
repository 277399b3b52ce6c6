// A block of a launch: its warps, shared memory and barriers.
#pragma once

#include "special_registers.h"
#include "warp.h"

#include <memory>
#include <vector>

namespace soft_gpu {

// Sizes and arguments of a launch.
struct Launch {
    const Kernel * kernel = nullptr;
    u32 grid[3] = {1, 1, 1}, block[3] = {1, 1, 1};
    u32 dynamic_bytes = 0; // shared memory
    bool is_cooperative = false;
    std::vector<u8> parameters;

    u32 n_threads() const { return block[0] * block[1] * block[2]; }
    u64 n_blocks() const { return static_cast<u64>(grid[0]) * grid[1] * grid[2]; }
};

// Settings of the device, read once.
struct Settings {
    bool is_reversed = false;         // SOFT_GPU_REVERSE: warps run in the opposite order
    u32 n_threads = 1;                // SOFT_GPU_THREADS: of the host, for the blocks of a launch
    u32 alone_us = 1000;              // that one thread runs before it starts others
    u32 n_multiprocessors = 82;       // SOFT_GPU_SMS; 82 are those of an RTX 3090
    u64 max_jumps_back = 100'000'000; // SOFT_GPU_MAX_JUMPS: of a warp, against endless loops
};
Settings & settings();

class Block {
  public:
    // workspace: of a cooperative launch, or 0. Registers are NaN until they are written.
    explicit Block(const Launch & launch, u64 workspace = 0);
    // Makes it the block of an index, with NaN in shared and local memory.
    void start(u64 index);
    // Lets every warp run until a barrier or for a while. True when all have ended.
    bool step();

  private:
    void set_special_registers(Warp & warp, bool only_of_block);
    bool open_barriers();
    bool open_barrier(const std::vector<Warp *> & warps, u32 n_alive);

    const Launch & launch_;
    const Kernel & kernel_;
    Place place_ = {};
    std::vector<Warp> warps_;
    std::unique_ptr<u8, void (*)(void *)> registers_, shared_, local_;
    size_t register_bytes_, shared_bytes_;
};

} // namespace soft_gpu
