// Loops over tiles and rows of x that the PackedProducts of all formats of packed weights share.
#pragma once

#include "cpu/matmul/product_lists.h"
#include "cpu/matmul/quantized_rows.h"
#include "cpu/simd/rows.h"

#include <algorithm>

namespace dfl::cpu {
namespace {

// Copies n groups of 4 bytes from one stride to another, and xors each byte with flip.
inline void copy_fours(const uint8_t * src, int64_t src_stride, uint8_t * dst, int64_t dst_stride,
                       int n, uint8_t flip) {
    for (int i = 0; i < n; ++i) {
        uint32_t four;
        std::memcpy(&four, src + i * src_stride, 4);
        four ^= flip * 0x01010101u;
        std::memcpy(dst + i * dst_stride, &four, 4);
    }
}

// True if hardware prefetching alone is faster than prefetches in code: on Zen 4 with up to
// unfetched_rows rows of x. One row of x then reads weights at 24 to 31 GB/s instead of 18 to 21.
inline bool leaves_fetches(int unfetched_rows, int64_t n_rows) {
    static const bool is_zen4 = on_zen4();
    return n_rows <= unfetched_rows && is_zen4;
}

template <int N, class Rows>
inline void prefetch(const uint8_t * p, const Rows & x) {
    if (x.ahead == 0) {
        return;
    }
#pragma GCC unroll 64
    for (int i = 0; i < N; i += 64) {
        _mm_prefetch(reinterpret_cast<const char *>(p + x.ahead + i), _MM_HINT_T1);
    }
}

template <class Format>
struct Tiles : Format {
    using V = typename Format::Vector;
    static constexpr int T = Format::T, TILE = T;
    static constexpr bool IN_PLACE = false;
#if defined(DFL_FEW_ROWS)
    static constexpr int MAX_ROWS = 3;
#else
    static constexpr int MAX_ROWS = Format::MAX_ROWS;
#endif
    // Bytes of x that stay in a core's L2 cache while all tiles of weights are read.
    static constexpr int64_t CHUNK = 256 * 1024;

    static int64_t n_tiles(int64_t n_out) { return (n_out + T - 1) / T; }

    // Returns the bytes of a tile, in whole cache lines, so that no load crosses one.
    static size_t tile_size(int64_t n_in) { return (Format::tile_size(n_in) + 63) / 64 * 64; }

    static size_t packed_size(int64_t n_in, int64_t n_out) {
        const bool fits = n_in > 0 && n_out > 0 && n_in % Format::BLOCK == 0;
        return fits ? n_tiles(n_out) * tile_size(n_in) : 0;
    }

    static void pack(const void * rows, int64_t n_in, int64_t n_out, int64_t first_tile,
                     int64_t last_tile, void * packed) {
        const size_t row_size = ggml_row_size(Format::TYPE, n_in), size = tile_size(n_in);
        for (int64_t t = first_tile; t < last_tile; ++t) {
            uint8_t * tile = static_cast<uint8_t *>(packed) + t * size;
            std::memset(tile, 0, size);
            for (int lane = 0; lane < T && t * T + lane < n_out; ++lane) {
                const auto * row = static_cast<const uint8_t *>(rows) + (t * T + lane) * row_size;
                Format::pack_row(row, n_in, lane, tile);
            }
        }
    }

    template <int R>
    static void multiply_tile(const uint8_t * tile, int64_t n_in, const uint8_t * x, int64_t x_size,
                              int64_t ahead, float * dst, int64_t dst_stride, int n) {
        typename V::F acc[R];
        for (int r = 0; r < R; ++r) {
            acc[r] = V::zero();
        }
        Format::template multiply<R>(tile, n_in, Rows<R>(x, x_size, ahead), acc);
        for (int r = 0; r < R; ++r) {
            V::store(dst + r * dst_stride, acc[r], n);
        }
    }

    using MultiplyTile = void (*)(const uint8_t *, int64_t, const uint8_t *, int64_t, int64_t,
                                  float *, int64_t, int);

    template <int... I>
    static MultiplyTile multiply_tile_of(int n_rows, std::integer_sequence<int, I...>) {
        static constexpr MultiplyTile OF[] = {multiply_tile<I + 1>...};
        return OF[n_rows - 1];
    }

    static void multiply(const void * packed, int64_t n_in, int64_t n_out, const void * x,
                         int64_t n_rows, int64_t first_tile, int64_t last_tile, float * dst,
                         int64_t dst_stride) {
        const int64_t x_size = Format::quantized_row_size(n_in), most = MAX_ROWS;
        const int64_t chunk = std::max<int64_t>(CHUNK / x_size / most, 1) * most;
        for (int64_t first = 0; first < n_rows; first += chunk) {
            const int64_t n = std::min(chunk, n_rows - first);
            const auto * rows = static_cast<const uint8_t *>(x) + first * x_size;
            multiply_rows(packed, n_in, n_out, rows, n, first_tile, last_tile,
                          dst + first * dst_stride, dst_stride);
        }
    }

    // Splits rows into groups of nearly equal size, because each group unpacks the tile again.
    static void multiply_rows(const void * packed, int64_t n_in, int64_t n_out, const uint8_t * x,
                              int64_t n_rows, int64_t first_tile, int64_t last_tile, float * dst,
                              int64_t dst_stride) {
        const int64_t size = tile_size(n_in), x_size = Format::quantized_row_size(n_in);
        const int64_t n_groups = (n_rows + MAX_ROWS - 1) / MAX_ROWS;
        const int64_t ahead = leaves_fetches(Format::UNFETCHED_ROWS, n_rows) ? 0 : V::FETCH_AHEAD;
        for (int64_t t = first_tile; t < last_tile; ++t) {
            const auto * tile = static_cast<const uint8_t *>(packed) + t * size;
            const int n = static_cast<int>(std::min<int64_t>(T, n_out - t * T));
            int64_t row = 0;
            for (int64_t group = 0; group < n_groups; ++group) {
                const int64_t end = n_rows * (group + 1) / n_groups;
                const auto function = multiply_tile_of(static_cast<int>(end - row),
                                                       std::make_integer_sequence<int, MAX_ROWS>());
                function(tile, n_in, x + row * x_size, x_size, group == 0 ? ahead : 0,
                         dst + row * dst_stride + t * T, dst_stride, n);
                row = end;
            }
        }
    }
};

} // namespace
} // namespace dfl::cpu
