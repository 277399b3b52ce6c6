#include "special_registers.h"

namespace soft_gpu {

const std::vector<SpecialRegister> & special_registers() {
    static const std::vector<SpecialRegister> all = {
        {"%tid.x", [](const Place & p) { return p.thread % p.block_size[0]; }},
        {"%tid.y", [](const Place & p) { return p.thread / p.block_size[0] % p.block_size[1]; }},
        {"%tid.z", [](const Place & p) { return p.thread / p.block_size[0] / p.block_size[1]; }},
        {"%ctaid.x", [](const Place & p) { return p.block[0]; }, true},
        {"%ctaid.y", [](const Place & p) { return p.block[1]; }, true},
        {"%ctaid.z", [](const Place & p) { return p.block[2]; }, true},
        {"%ntid.x", [](const Place & p) { return p.block_size[0]; }},
        {"%ntid.y", [](const Place & p) { return p.block_size[1]; }},
        {"%ntid.z", [](const Place & p) { return p.block_size[2]; }},
        {"%nctaid.x", [](const Place & p) { return p.grid_size[0]; }},
        {"%nctaid.y", [](const Place & p) { return p.grid_size[1]; }},
        {"%nctaid.z", [](const Place & p) { return p.grid_size[2]; }},
        {"%laneid", [](const Place & p) { return p.lane; }},
        {"%warpid", [](const Place & p) { return p.warp; }},
        {"%nwarpid", [](const Place & p) { return p.n_warps; }},
        {"%lanemask_eq", [](const Place & p) { return 1u << p.lane; }},
        {"%lanemask_lt", [](const Place & p) { return (1u << p.lane) - 1; }},
        {"%lanemask_le", [](const Place & p) { return (2u << p.lane) - 1; }},
        {"%lanemask_gt", [](const Place & p) { return ~((2u << p.lane) - 1); }},
        {"%lanemask_ge", [](const Place & p) { return ~((1u << p.lane) - 1); }},
        {"%smid", [](const Place & p) { return p.block[0] % p.n_multiprocessors; }, true},
        {"%nsmid", [](const Place & p) { return p.n_multiprocessors; }},
        {"%total_smem_size", [](const Place & p) { return p.shared_bytes; }},
        {"%dynamic_smem_size", [](const Place & p) { return p.dynamic_bytes; }},
        // The runtime's workspace for barriers over the whole grid.
        {"%envreg1", [](const Place & p) { return static_cast<u32>(p.workspace >> 32); }},
        {"%envreg2", [](const Place & p) { return static_cast<u32>(p.workspace); }},
    };
    return all;
}

} // namespace soft_gpu
