#include "cpu/isa/tile_kernels.h"
#include "cpu/simd/dot_four.h"
#include "cpu/simd/vector256.h"

namespace dfl::cpu {

namespace {

struct VectorVnni : DotFour<VectorVnni, Vector256> {
    static constexpr const char * NAME = "avxvnni";
    static constexpr int MAX_ROWS_32 = 6, MAX_ROWS_256 = 6;
    static constexpr int UNPACKED_ROWS = 4, UNPACKED_PARTS = 16, MIN_UNPACKED_ROWS = 7;

    static I dot_four(I sum, I weights, I x) { return _mm256_dpbusd_avx_epi32(sum, weights, x); }
};

} // namespace

Kernels avxvnni_kernels() { return {{tile_products<VectorVnni>()}}; }

} // namespace dfl::cpu
