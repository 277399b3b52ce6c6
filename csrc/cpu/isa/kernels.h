// Kernels of each instruction set, from source files compiled for it. Sets that the compiler or the
// target architecture lacks are left out of the library.
#pragma once

#include "cpu/attention/cell_attention.h"
#include "cpu/delta_net/delta_head.h"
#include "cpu/matmul/product_lists.h"
#include "cpu/rows/row_kernel.h"

#include <string>
#include <vector>

namespace dfl::cpu {

// Kernels of one instruction set. A kernel is NULL if the kernel of a later set is as good.
// The last set, portable, has all kernels but products of quantised weights.
struct Kernels {
    std::vector<PackedProducts> products;
    const CellAttentionKernel * attention = nullptr;
    const DeltaHeadKernel * delta_head = nullptr;
    const RowKernel * rows = nullptr;
};

struct KernelSet {
    const char * name;
    bool (*runs_here)();
    Kernels (*kernels)();
};

// Returns the instruction sets of sets.def that were compiled, best first.
const std::vector<KernelSet> & kernel_sets();

// Attention kernels, in files of their own because GCC 12 inlines less beside other kernels.
const CellAttentionKernel * avx512_attention();
const CellAttentionKernel * avx2_attention();
const CellAttentionKernel * portable_attention();

// Returns the kernels of the sets that this CPU supports, best first. The environment variable
// DFLASH_CPU names the first set to use; throws DFL_STATUS_ARGUMENT for an unknown name.
const std::vector<Kernels> & kernels();
std::vector<std::string> kernel_set_names();

} // namespace dfl::cpu
