// The kernels of each instruction set, in source files compiled for it. A set that the compiler
// lacks, or the machine built for, is not in the library.
#pragma once

#include "cpu/attention/cell_attention.h"
#include "cpu/delta_net/delta_head.h"
#include "cpu/matmul/product_lists.h"
#include "cpu/rows/row_kernel.h"

#include <vector>

namespace dfl::cpu {

// NULL for kernels that a set does not have better than another one.
struct Kernels {
    PackedProducts products;
    const CellAttentionKernel * attention = nullptr;
    const DeltaHeadKernel * delta_head = nullptr;
    const RowKernel * rows = nullptr;
};

Kernels avx512bf16_kernels();
Kernels avx512vnni_kernels();
Kernels avx512_kernels();
Kernels avxvnni_kernels();
Kernels avx2_kernels();
Kernels avx2_float_kernels();
Kernels portable_kernels();
// Part of these, in files of their own: among other kernels GCC 12 inlines other parts of them, and
// a row alone took 3 % longer.
const CellAttentionKernel * avx512_attention();
const CellAttentionKernel * avx2_attention();
const CellAttentionKernel * portable_attention();

// Returns the sets that this CPU runs, best first.
const std::vector<Kernels> & kernels();

} // namespace dfl::cpu
