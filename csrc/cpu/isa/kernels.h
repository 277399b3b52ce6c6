// The kernels of each instruction set, in source files compiled for it. A set that the compiler
// lacks, or the machine built for, is not in the library.
#pragma once

#include "cpu/attention/cell_attention.h"
#include "cpu/delta_net/delta_head.h"
#include "cpu/matmul/product_lists.h"
#include "cpu/rows/row_kernel.h"

#include <string>
#include <vector>

namespace dfl::cpu {

// NULL for kernels that a set does not have better than another one.
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

// Rows of sets.def that were compiled, best first.
const std::vector<KernelSet> & kernel_sets();

// Kernels in files of their own: beside others GCC 12 inlines less of them, and a row alone took
// 3 % longer.
const CellAttentionKernel * avx512_attention();
const CellAttentionKernel * avx2_attention();
const CellAttentionKernel * portable_attention();

// Returns the kernels of the sets that this CPU runs, best first; with DFLASH_CPU in the
// environment from the set of that name on. Throws DFL_STATUS_ARGUMENT for another name.
const std::vector<Kernels> & kernels();
// Returns the names of these sets.
std::vector<std::string> kernel_set_names();

} // namespace dfl::cpu
