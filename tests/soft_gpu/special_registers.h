// Special registers of PTX, which have the same place in every kernel's register file.
#pragma once

#include "types.h"

#include <vector>

namespace soft_gpu {

// Place of a thread, from which the special registers are computed.
struct Place {
    u32 thread, warp, lane, n_warps, block[3], block_size[3], grid_size[3], n_multiprocessors;
    u64 workspace; // of a cooperative launch, or 0
    u32 shared_bytes, dynamic_bytes;
};

struct SpecialRegister {
    const char * name;
    u32 (*value)(const Place &);
    bool is_of_block = false; // the same for all threads of a block, another in each block
};
const std::vector<SpecialRegister> & special_registers();

} // namespace soft_gpu
