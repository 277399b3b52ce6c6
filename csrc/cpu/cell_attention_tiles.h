// The loops of CellAttentionKernel over vectors of V::T floats. Lanes are cells for the scores and
// values of a head for the sums, so no sum crosses them.
#pragma once

#include "cell_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace dfl::cpu {
namespace {

template <class V>
struct CellAttentionTiles {
    using F = typename V::F;
    static constexpr int T = V::T;
    static constexpr int BLOCK = 4 * T; // cells whose keys are transposed at once
    static constexpr int TILE = 4;      // queries in registers
    static constexpr uint16_t MASKED = 0xfc00;

    static int64_t padded(int64_t n_cells) { return (n_cells + BLOCK - 1) / BLOCK * BLOCK; }

    static int64_t scratch_size(int64_t head_dim, int64_t n_cells) {
        return MAX_QUERIES * head_dim + BLOCK * head_dim + MAX_QUERIES * padded(n_cells);
    }

    // n keys, zeros after them: [head_dim][BLOCK].
    static void transpose(const uint16_t * k, int64_t stride, int64_t n, int64_t head_dim,
                          float * keys) {
        for (int64_t cell = 0; cell < BLOCK; cell += T) {
            for (int64_t j = 0; j < head_dim; j += T) {
                F rows[T];
                for (int i = 0; i < T; ++i) {
                    rows[i] = cell + i < n ? V::halves(k + (cell + i) * stride + j) : V::zero();
                }
                V::transpose(rows);
                for (int i = 0; i < T; ++i) {
                    V::store(keys + (j + i) * BLOCK + cell, rows[i]);
                }
            }
        }
    }

    // Scores of N queries with a block of keys.
    template <int N>
    static void score(const float * q, int64_t head_dim, const float * keys, float * scores,
                      int64_t stride) {
        F sum[N][4];
        for (auto & row : sum) {
            std::fill(row, row + 4, V::zero());
        }
        for (int64_t j = 0; j < head_dim; ++j, keys += BLOCK) {
            F key[4];
            for (int i = 0; i < 4; ++i) {
                key[i] = V::load(keys + i * T);
            }
            for (int r = 0; r < N; ++r) {
                const F value = V::spread(q[r * head_dim + j]);
                for (int i = 0; i < 4; ++i) {
                    sum[r][i] = V::mul_add(value, key[i], sum[r][i]);
                }
            }
        }
        for (int r = 0; r < N; ++r) {
            for (int i = 0; i < 4; ++i) {
                V::store(scores + r * stride + i * T, sum[r][i]);
            }
        }
    }

    // Scores to weights that are exp(score - the largest), 0 where masked and from n on.
    static void weigh(float * scores, const uint16_t * mask, int64_t n) {
        for (int64_t c = n; c < padded(n); ++c) {
            scores[c] = -INFINITY;
        }
        F most = V::spread(-INFINITY);
        int64_t c = 0;
        for (; c + T <= n; c += T) {
            const F score = V::add(V::load(scores + c), V::halves(mask + c));
            V::store(scores + c, score);
            most = V::max(most, score);
        }
        for (; c < n; ++c) {
            scores[c] = mask[c] == MASKED ? -INFINITY : scores[c];
            most = V::max(most, V::spread(scores[c]));
        }
        float lanes[T];
        V::store(lanes, most);
        const float largest = *std::max_element(lanes, lanes + T);
        // Where a row sees nothing, minus infinity less itself would not be a number.
        const F top = V::spread(largest == -INFINITY ? 0.0f : largest);
        for (c = 0; c < padded(n); c += T) {
            V::store(scores + c, V::exp(V::sub(V::load(scores + c), top)));
        }
    }

    // The weighted mean of N_V vectors of the values, for N queries.
    template <int N, int N_V>
    static void mean(const float * weights, int64_t stride, const uint16_t * v, int64_t v_stride,
                     int64_t n_cells, float * const * out) {
        F sum[N][N_V], total[N];
        for (int r = 0; r < N; ++r) {
            std::fill(sum[r], sum[r] + N_V, V::zero());
            total[r] = V::zero();
        }
        for (int64_t c = 0; c < n_cells; ++c, v += v_stride) {
            F value[N_V];
            for (int i = 0; i < N_V; ++i) {
                value[i] = V::halves(v + i * T);
            }
            for (int r = 0; r < N; ++r) {
                const F weight = V::spread(weights[r * stride + c]);
                total[r] = V::add(total[r], weight);
                for (int i = 0; i < N_V; ++i) {
                    sum[r][i] = V::mul_add(weight, value[i], sum[r][i]);
                }
            }
        }
        for (int r = 0; r < N; ++r) {
            for (int i = 0; i < N_V; ++i) {
                V::store(out[r] + i * T, V::divide(sum[r][i], total[r]));
            }
        }
    }

    template <int N>
    static void means(const CellAttention & work, const float * weights, int64_t stride,
                      int64_t first, int64_t n_cells, float * const * out) {
        float * at[N];
        for (int64_t j = 0; j < work.head_dim;) {
            for (int r = 0; r < N; ++r) {
                at[r] = out[r] + j;
            }
            const uint16_t * v = work.v + first * work.v_cell + j;
            if (j + V::WIDE * T <= work.head_dim) {
                mean<N, V::WIDE>(weights + first, stride, v, work.v_cell, n_cells, at);
                j += V::WIDE * T;
            } else {
                mean<N, 1>(weights + first, stride, v, work.v_cell, n_cells, at);
                j += T;
            }
        }
    }

    // Calls f<N>(first, N) for tiles of n queries.
    template <class Wide, class Narrow>
    static void by_tiles(int64_t n, Wide && wide, Narrow && narrow) {
        int64_t r = 0;
        for (; r + TILE <= n; r += TILE) {
            wide(r);
        }
        for (; r < n; ++r) {
            narrow(r);
        }
    }

    static void attend(const CellAttention & work, int64_t first, int64_t n, float * scratch) {
        const int64_t d = work.head_dim, stride = padded(work.n_cells);
        float * q = scratch;
        float * keys = q + MAX_QUERIES * d;
        float * scores = keys + BLOCK * d;
        float * out[MAX_QUERIES];
        const uint16_t * masks[MAX_QUERIES];
        // Cells that some query sees.
        int64_t begin = work.n_cells, end = 0;
        for (int64_t r = 0; r < n; ++r) {
            const int64_t row = (first + r) / work.n_group, head = (first + r) % work.n_group;
            const float * from = work.q + row * work.q_row + head * work.q_head;
            std::transform(from, from + d, q + r * d, [&](float x) { return x * work.scale; });
            out[r] = work.out + row * work.out_row + head * d;
            masks[r] = work.mask + row * work.mask_row;
            int64_t low = 0, high = work.n_cells;
            while (high > end && masks[r][high - 1] == MASKED) {
                --high;
            }
            while (low < begin && masks[r][low] == MASKED) {
                ++low;
            }
            end = std::max(end, high);
            begin = std::min(begin, low);
        }
        begin = begin / BLOCK * BLOCK;
        for (int64_t cell = begin; cell < end; cell += BLOCK) {
            transpose(work.k + cell * work.k_cell, work.k_cell,
                      std::min<int64_t>(BLOCK, end - cell), d, keys);
            float * to = scores + cell;
            by_tiles(
                n, [&](int64_t r) { score<TILE>(q + r * d, d, keys, to + r * stride, stride); },
                [&](int64_t r) { score<1>(q + r * d, d, keys, to + r * stride, stride); });
        }
        for (int64_t r = 0; r < n; ++r) {
            weigh(scores + r * stride + begin, masks[r] + begin, end - begin);
        }
        const int64_t cells = std::max<int64_t>(0, end - begin);
        by_tiles(
            n,
            [&](int64_t r) {
                means<TILE>(work, scores + r * stride, stride, begin, cells, out + r);
            },
            [&](int64_t r) { means<1>(work, scores + r * stride, stride, begin, cells, out + r); });
    }

    static constexpr CellAttentionKernel KERNEL = {T, scratch_size, attend};
};

} // namespace
} // namespace dfl::cpu
