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

// Prefetches the N bytes of weights that begin `ahead` bytes after p into the cache Fetch::TO; does
// nothing if `ahead` is 0. Unless inlined, GCC 12 drops the call, as it finds no effect of it.
template <class Fetch, int N>
[[gnu::always_inline]] inline void prefetch(const uint8_t * p, int64_t ahead) {
    if (ahead == 0) {
        return;
    }
#pragma GCC unroll 64
    for (int i = 0; i < N; i += 64) {
        _mm_prefetch(reinterpret_cast<const char *>(p + ahead + i), Fetch::TO);
    }
}

// LARGEST of formats whose weights are signed bytes, stored with V::SIGNED_OFFSET.
constexpr int SIGNED = 0;

template <class Vector, int TILES, int R>
inline void clear(Vector (&sums)[TILES][R]) {
    for (int t = 0; t < TILES; ++t) {
        for (int r = 0; r < R; ++r) {
            sums[t][r] = Vector{};
        }
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
        typename V::F acc[1][R];
        clear(acc);
        Format::template multiply<R>(tile, n_in, Rows<R>(x, x_size, ahead), acc);
        for (int r = 0; r < R; ++r) {
            V::store(dst + r * dst_stride, acc[0][r], n);
        }
    }

    using MultiplyTile = void (*)(const uint8_t *, int64_t, const uint8_t *, int64_t, int64_t,
                                  float *, int64_t, int);

    template <int... I>
    static MultiplyTile multiply_tile_of(int n_rows, std::integer_sequence<int, I...>) {
        static constexpr MultiplyTile OF[] = {multiply_tile<I + 1>...};
        return OF[n_rows - 1];
    }

    static constexpr int UNPACKED_ROWS = V::UNPACKED_ROWS;
    static constexpr bool UNPACKS = Format::PARTS_OF_256 >= V::UNPACKED_PARTS;

    static void multiply(const void * packed, int64_t n_in, int64_t n_out, const void * x,
                         int64_t n_rows, int64_t first_tile, int64_t last_tile, float * dst,
                         int64_t dst_stride) {
        const bool unpacks = UNPACKS && n_rows >= std::max(V::MIN_UNPACKED_ROWS, MAX_ROWS + 1);
        const int64_t x_size = Format::quantized_row_size(n_in);
        const int64_t most = unpacks ? MIN_UNPACKED_CHUNK : MAX_ROWS;
        int64_t chunk = std::max<int64_t>(CHUNK / x_size / most, 1) * most;
        chunk = unpacks ? std::min<int64_t>(chunk, MAX_UNPACKED_CHUNK) : chunk;
        for (int64_t first = 0; first < n_rows; first += chunk) {
            const int64_t n = std::min(chunk, n_rows - first);
            const auto * rows = static_cast<const uint8_t *>(x) + first * x_size;
            if constexpr (UNPACKS) {
                if (unpacks) {
                    multiply_unpacked(packed, n_in, n_out, rows, n, first_tile, last_tile,
                                      dst + first * dst_stride, dst_stride);
                    continue;
                }
            }
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
        const int64_t ahead =
            leaves_fetches(Format::UNFETCHED_ROWS, n_rows) ? 0 : Format::Fetch::AHEAD;
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

    // Rows that an unpacked block multiplies: at least MIN_..., for unpacking to be cheap.
    static constexpr int64_t MIN_UNPACKED_CHUNK = 16, MAX_UNPACKED_CHUNK = 64;
    static constexpr int PAIR = 2; // tiles that are unpacked together

    // Unpacks each block of weights once for all rows, which are at most MAX_UNPACKED_CHUNK.
    static void multiply_unpacked(const void * packed, int64_t n_in, int64_t n_out,
                                  const uint8_t * x, int64_t n_rows, int64_t first_tile,
                                  int64_t last_tile, float * dst, int64_t dst_stride) {
        const auto size = static_cast<int64_t>(tile_size(n_in));
        for (int64_t t = first_tile; t < last_tile; t += PAIR) {
            const auto * tile = static_cast<const uint8_t *>(packed) + t * size;
            const auto function =
                t + 1 < last_tile ? multiply_unpacked_tiles<PAIR> : multiply_unpacked_tiles<1>;
            function(tile, size, n_in, x, n_rows, dst + t * T, dst_stride, n_out - t * T);
        }
    }

    template <int TILES>
    static void multiply_unpacked_tiles(const uint8_t * tile, int64_t size, int64_t n_in,
                                        const uint8_t * x, int64_t n_rows, float * dst,
                                        int64_t dst_stride, int64_t n_out) {
        typename Format::Unpacked unpacked[TILES];
        typename V::F sums[MAX_UNPACKED_CHUNK][TILES];
        for (int64_t r = 0; r < n_rows; ++r) {
            std::fill_n(sums[r], TILES, V::zero());
        }
        const int64_t x_size = Format::quantized_row_size(n_in);
        const int64_t n_groups = (n_rows + UNPACKED_ROWS - 1) / UNPACKED_ROWS;
        const int64_t n_steps = (n_in + Format::UNPACKED_INPUTS - 1) / Format::UNPACKED_INPUTS;
        const int64_t n_shares = n_steps * (TILES + n_groups);
        for (int64_t step = 0; step < n_steps; ++step) {
            int64_t share = step * (TILES + n_groups);
            for (int t = 0; t < TILES; ++t) {
                prefetch_tiles<TILES>(tile, size, share++, n_shares);
                Format::unpack(tile + t * size, n_in, step, unpacked[t]);
            }
            const uint8_t * of_step = x + step * Format::UNPACKED_X;
            int64_t row = 0;
            for (int64_t group = 0; group < n_groups; ++group) {
                prefetch_tiles<TILES>(tile, size, share++, n_shares);
                const int64_t end = n_rows * (group + 1) / n_groups;
                const auto function = multiply_group_of<TILES>(
                    static_cast<int>(end - row), std::make_integer_sequence<int, UNPACKED_ROWS>());
                function(unpacked, n_in, step, of_step + row * x_size, x_size, sums + row);
                row = end;
            }
        }
        for (int64_t r = 0; r < n_rows; ++r) {
            for (int t = 0; t < TILES; ++t) {
                const auto n = static_cast<int>(std::min<int64_t>(T, n_out - t * T));
                V::store(dst + r * dst_stride + t * T, sums[r][t], n);
            }
        }
    }

    // Prefetches the i-th of n shares of tiles, Fetch::AHEAD bytes ahead.
    template <int TILES>
    [[gnu::always_inline]] static void prefetch_tiles(const uint8_t * tile, int64_t size, int64_t i,
                                                      int64_t n) {
        for (int64_t at = size * i / n / 64 * 64; at < size * (i + 1) / n / 64 * 64; at += 64) {
            // Behind the end of a tile follows the tile after those that are unpacked together.
            const int64_t ahead = at + Format::Fetch::AHEAD < size ? 0 : (TILES - 1) * size;
            for (int t = 0; t < TILES; ++t) {
                const uint8_t * next = tile + t * size + at + Format::Fetch::AHEAD + ahead;
                _mm_prefetch(reinterpret_cast<const char *>(next), Format::Fetch::TO);
            }
        }
    }

    template <int TILES>
    using MultiplyGroup = void (*)(const typename Format::Unpacked *, int64_t, int64_t,
                                   const uint8_t *, int64_t, typename V::F (*)[TILES]);

    template <int TILES, int... I>
    static MultiplyGroup<TILES> multiply_group_of(int n_rows, std::integer_sequence<int, I...>) {
        static constexpr MultiplyGroup<TILES> OF[] = {multiply_group<TILES, I + 1>...};
        return OF[n_rows - 1];
    }

    template <int TILES, int R>
    static void multiply_group(const typename Format::Unpacked * unpacked, int64_t n_in,
                               int64_t step, const uint8_t * x, int64_t x_size,
                               typename V::F (*sums)[TILES]) {
        typename V::F acc[TILES][R];
        for (int t = 0; t < TILES; ++t) {
            for (int r = 0; r < R; ++r) {
                acc[t][r] = sums[r][t];
            }
        }
        Format::template multiply_unpacked<TILES, R>(unpacked, n_in, step, Rows<R>(x, x_size, 0),
                                                     acc);
        for (int t = 0; t < TILES; ++t) {
            for (int r = 0; r < R; ++r) {
                sums[r][t] = acc[t][r];
            }
        }
    }
};

} // namespace
} // namespace dfl::cpu
