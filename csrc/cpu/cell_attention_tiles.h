// The loops of CellAttentionKernel over vectors of V::T floats. Lanes are cells for the scores and
// values of a head for the sums, so a score does not depend on where its cell lies in a tile, and
// no sum of values crosses lanes.
#pragma once

#include "cell_attention.h"
#include "cell_values.h"
#include "cell_views.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

namespace dfl::cpu {
namespace {

template <class V>
struct CellAttentionTiles {
    using F = typename V::F;
    static constexpr int T = V::T;
    static constexpr int BLOCK = CELL_BLOCK;
    static constexpr int QUERIES = 6; // in registers, with V::WIDE vectors of cells or values
    static constexpr int64_t PER_POINTER = sizeof(const char *) / sizeof(float);
    static_assert(BLOCK % (V::WIDE * T) == 0 && BLOCK % (4 * T) == 0);

    static int64_t padded(int64_t n) { return (n + T - 1) / T * T; }
    static int64_t n_tiles(int64_t n_cells) { return (n_cells + BLOCK - 1) / BLOCK; }

    // A query's largest score, its weights' sum, and the weighted sum of values [padded(d)].
    struct State {
        float *most, *total, *sum;
    };

    struct Scratch {
        int64_t d, width; // of a head, and padded
        int64_t stride;   // of scores
        float *q, *keys, *values, *rows, *scores, *zeros;
        const char ** open; // where sums read the values of a block's open cells
        State part, all;    // of a segment, and of those merged

        Scratch(int64_t head_dim, int64_t n_open, float * at)
            : d(head_dim), width(padded(head_dim)), stride(BLOCK * (1 + n_tiles(n_open))) {
            const auto take = [&](int64_t n) {
                float * here = at;
                at += (n + 15) / 16 * 16;
                return here;
            };
            at += (64 - reinterpret_cast<uintptr_t>(at) % 64) % 64 / sizeof(float);
            q = take(MAX_QUERIES * d);
            keys = take(stride * width);
            values = take((BLOCK + n_open) * width);
            rows = take(T * width);
            scores = take(QUERIES * stride);
            zeros = take(width);
            open = reinterpret_cast<const char **>(take(n_open * PER_POINTER));
            for (State * state : {&part, &all}) {
                *state = {take(MAX_QUERIES), take(MAX_QUERIES), take(MAX_QUERIES * width)};
            }
        }
    };

    static int64_t scratch_size(int64_t head_dim, int64_t n_open) {
        const int64_t width = padded(head_dim), stride = BLOCK * (1 + n_tiles(n_open));
        const int64_t of_queries = MAX_QUERIES * (head_dim + 2 * width + 4);
        return of_queries + stride * width + (BLOCK + n_open + T + 1) * width + QUERIES * stride +
               n_open * PER_POINTER + 16 * 16; // the last is what aligns them
    }

    static int64_t part_size(int64_t head_dim) { return padded(head_dim) + 2; }

    // ---- a block's keys and values

    // Calls body with a value of the type that values of `type` lie as, or as float.
    template <class Body>
    static void with_type(ggml_type type, Body && body) {
        switch (type) {
        case GGML_TYPE_F16:
            return body(Half());
        case GGML_TYPE_BF16:
            return body(Brain());
        default:
            return body(float());
        }
    }

    // How the values of a head are kept for n queries: as they lie, or as floats. To widen values
    // of 16 bits beforehand takes as long as to do it on the way for some fifty queries.
    static ggml_type kept_type(const CellRows & rows, const Scratch & s, int64_t n_queries) {
        const bool is_narrow = rows.type == GGML_TYPE_F16 || rows.type == GGML_TYPE_BF16;
        const bool stays = s.d == s.width && is_narrow && n_queries <= 8 * QUERIES;
        return stays ? rows.type : GGML_TYPE_F32;
    }

    // Keys of T cells: [width][T] at to, BLOCK apart. cells: where each one's values begin.
    template <class Row, class To, class Read>
    static void transpose(const char * const * cells, int64_t width, To * to, Read && read) {
        for (int64_t j = 0; j < width; j += T) {
            Row r[T];
            for (int i = 0; i < T; ++i) {
                r[i] = read(cells[i], j);
            }
            V::transpose(r);
            for (int i = 0; i < T; ++i) {
                V::store(to + (j + i) * BLOCK, r[i]);
            }
        }
    }

    // Keys of cells [first, end) of a tile, NULL for none, and others beside them, as `kept`:
    // [width][BLOCK] at keys.
    static void load_keys(const CellRows & k, const char * const * cells, int64_t first,
                          int64_t end, ggml_type kept, const Scratch & s, float * keys) {
        const bool is_read_first = s.d != s.width || ggml_is_quantized(k.type);
        for (int64_t c = first / T * T; c < end; c += T) {
            const char * from[T];
            for (int i = 0; i < T; ++i) {
                from[i] = cells[c + i];
                if (from[i] == nullptr) {
                    from[i] = reinterpret_cast<const char *>(s.zeros);
                } else if (is_read_first) {
                    float * row = s.rows + i * s.width;
                    CellValues<V>::read(k.type, from[i], s.d, row);
                    std::fill(row + s.d, row + s.width, 0.0f);
                    from[i] = reinterpret_cast<const char *>(row);
                }
            }
            if (kept != GGML_TYPE_F32) {
                transpose<typename V::H>(from, s.width, reinterpret_cast<uint16_t *>(keys) + c,
                                         [](const char * row, int64_t j) {
                                             return V::load(
                                                 reinterpret_cast<const uint16_t *>(row) + j);
                                         });
                continue;
            }
            with_type(is_read_first ? GGML_TYPE_F32 : k.type, [&](auto of) {
                using Value = decltype(of);
                transpose<F>(from, s.width, keys + c, [](const char * row, int64_t j) {
                    return CellValues<V>::read(reinterpret_cast<const Value *>(row) + j);
                });
            });
        }
    }

    // Where sums read the values of cells [first, end) of a tile: there, or as floats at `values`.
    static void load_values(const CellRows & v, const char * const * cells, int64_t first,
                            int64_t end, bool in_place, const Scratch & s, float * values,
                            const char ** rows) {
        for (int64_t c = first; c < end; ++c) {
            if (cells[c] == nullptr) {
                rows[c] = reinterpret_cast<const char *>(s.zeros);
            } else if (in_place) {
                rows[c] = cells[c];
            } else {
                float * to = values + c * s.width;
                CellValues<V>::read(v.type, cells[c], s.d, to);
                std::fill(to + s.d, to + s.width, 0.0f);
                rows[c] = reinterpret_cast<const char *>(to);
            }
        }
    }

    // ---- products

    template <int N = QUERIES, class Body>
    static void with_count(int64_t n, Body && body) {
        if (n == N) {
            body(std::integral_constant<int, N>());
        } else if constexpr (N > 1) {
            with_count<N - 1>(n, body);
        }
    }

    // Lines that are asked for while other work goes on, a few at each of its steps: a burst of
    // them would stop the core until the first came. Into the second cache, as far more fetches
    // stay in flight there than into the first. A core does not foresee them, as heads lie beside
    // each other in a cell, and the weights of a pass drive them out of all caches.
    struct Fetch {
        static constexpr int LINE = 64;
        const char * const * cells; // where values of a head begin, NULL for none
        int64_t cell, end;
        int64_t bytes; // of a head
        int64_t at = 0;

        void lines(int64_t n) {
            for (; n > 0 && cell < end; --n) {
                __builtin_prefetch(cells[cell] + at, 0, 2);
                at += LINE;
                if (at >= bytes) {
                    at = 0;
                    ++cell;
                }
            }
        }
        void rest() { lines(INT64_MAX); }
    };

    // A loop over i in [first, end) of products, which asks for lines on its way: for all of a
    // block's by the time that those of a block have been made, where values take 16 bits.
    template <class Body>
    static void loop(int64_t first, int64_t end, Fetch & fetch, Body && body) {
        constexpr int64_t step = 8, lines = step * V::WIDE * T / 32;
        for (int64_t i = first; i < end;) {
            fetch.lines(lines);
            for (const int64_t stop = std::min(i + step, end); i < stop; ++i) {
                body(i);
            }
        }
    }

    // Scores of N queries with W vectors of keys.
    template <int N, int W, class Key>
    static void score(const float * q, int64_t d, const Key * keys, float * scores, int64_t stride,
                      Fetch & fetch) {
        F sum[N][W];
#pragma GCC unroll 8
        for (int r = 0; r < N; ++r) {
#pragma GCC unroll 8
            for (int i = 0; i < W; ++i) {
                sum[r][i] = V::zero();
            }
        }
        loop(0, d, fetch, [&](int64_t j) {
            F key[W];
#pragma GCC unroll 8
            for (int i = 0; i < W; ++i) {
                key[i] = CellValues<V>::read(keys + j * BLOCK + i * T);
            }
#pragma GCC unroll 8
            for (int r = 0; r < N; ++r) {
                const F value = V::spread(q[r * d + j]);
#pragma GCC unroll 8
                for (int i = 0; i < W; ++i) {
                    sum[r][i] = V::mul_add(value, key[i], sum[r][i]);
                }
            }
        });
#pragma GCC unroll 8
        for (int r = 0; r < N; ++r) {
#pragma GCC unroll 8
            for (int i = 0; i < W; ++i) {
                V::store(scores + r * stride + i * T, sum[r][i]);
            }
        }
    }

    // Scores of n queries with keys [first, end) of a tile, and others beside them.
    template <class Key>
    static void score_all(int64_t n, const float * q, int64_t d, const Key * keys, int64_t first,
                          int64_t end, float * scores, int64_t stride, Fetch & fetch) {
        with_count(n, [&](auto count) {
            constexpr int N = decltype(count)::value;
            int64_t c = first / T * T;
            for (; c + (V::WIDE - 1) * T < end; c += V::WIDE * T) {
                score<N, V::WIDE>(q, d, keys + c, scores + c, stride, fetch);
            }
            for (; c < end; c += T) {
                score<N, 1>(q, d, keys + c, scores + c, stride, fetch);
            }
        });
    }

    // Adds the weighted values of cells [first, end) to the sums of N queries, W vectors of them.
    template <int N, int W, class Value>
    static void add_values(const float * weights, int64_t stride, const char * const * rows,
                           int64_t first, int64_t end, int64_t j, float * sums, int64_t width,
                           Fetch & fetch) {
        F sum[N][W];
#pragma GCC unroll 8
        for (int r = 0; r < N; ++r) {
#pragma GCC unroll 8
            for (int i = 0; i < W; ++i) {
                sum[r][i] = V::load(sums + r * width + j + i * T);
            }
        }
        loop(first, end, fetch, [&](int64_t c) {
            const Value * row = reinterpret_cast<const Value *>(rows[c]) + j;
            F value[W];
#pragma GCC unroll 8
            for (int i = 0; i < W; ++i) {
                value[i] = CellValues<V>::read(row + i * T);
            }
#pragma GCC unroll 8
            for (int r = 0; r < N; ++r) {
                const F weight = V::spread(weights[r * stride + c]);
#pragma GCC unroll 8
                for (int i = 0; i < W; ++i) {
                    sum[r][i] = V::mul_add(weight, value[i], sum[r][i]);
                }
            }
        });
#pragma GCC unroll 8
        for (int r = 0; r < N; ++r) {
#pragma GCC unroll 8
            for (int i = 0; i < W; ++i) {
                V::store(sums + r * width + j + i * T, sum[r][i]);
            }
        }
    }

    template <class Value>
    static void add_all(int64_t n, const float * weights, int64_t stride, const char * const * rows,
                        int64_t first, int64_t end, float * sums, int64_t width, Fetch & fetch) {
        if (first >= end) {
            return;
        }
        with_count(n, [&](auto count) {
            constexpr int N = decltype(count)::value;
            int64_t j = 0;
            for (; j + V::WIDE * T <= width; j += V::WIDE * T) {
                add_values<N, V::WIDE, Value>(weights, stride, rows, first, end, j, sums, width,
                                              fetch);
            }
            for (; j < width; j += T) {
                add_values<N, 1, Value>(weights, stride, rows, first, end, j, sums, width, fetch);
            }
        });
    }

    // ---- the softmax

    static float exp_of(float x) {
        float lanes[T];
        V::store(lanes, V::exp(V::spread(x)));
        return lanes[0];
    }

    static void scale_sum(float * sum, int64_t width, float by) {
        for (int64_t j = 0; j < width; j += T) {
            V::store(sum + j, V::mul(V::load(sum + j), V::spread(by)));
        }
    }

    // What is subtracted from scores: minus infinity less itself would not be a number.
    static float top_of(float most) { return most == -INFINITY ? 0.0f : most; }

    // The largest of a block's scores of a query for cells [first, end), which is not empty. What
    // shares vectors with these becomes minus infinity.
    static float largest_of(float * scores, int64_t first, int64_t end) {
        const int64_t begin = first / T * T, stop = padded(end);
        std::fill(scores + begin, scores + first, -INFINITY);
        std::fill(scores + end, scores + stop, -INFINITY);
        F largest = V::load(scores + begin);
        for (int64_t c = begin + T; c < stop; c += T) {
            largest = V::max(largest, V::load(scores + c));
        }
        return V::largest(largest);
    }

    // These scores to weights.
    static void weigh(float * scores, int64_t first, int64_t end, float largest, float & most,
                      float & total, float * sum, int64_t width) {
        if (largest > most) {
            const float by = exp_of(most - largest);
            total *= by;
            scale_sum(sum, width, by);
            most = largest;
        }
        const int64_t begin = first / T * T, stop = padded(end);
        const F top = V::spread(top_of(most));
        F sums[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
        for (int c = 0; c < BLOCK; c += 4 * T) {
            for (int i = 0; i < 4; ++i) {
                const int64_t at = c + i * T;
                if (at >= begin && at < stop) { // the others would add nothing
                    const F weight = V::exp(V::sub(V::load(scores + at), top));
                    V::store(scores + at, weight);
                    sums[i] = V::add(sums[i], weight);
                }
            }
        }
        float added[4];
        V::sums(sums, added);
        total += (added[0] + added[1]) + (added[2] + added[3]);
    }

    static bool is_empty(float most, float total) { return most == -INFINITY && total == 0.0f; }

    // One more segment.
    static void fold(float most, float total, const float * sum, float & all_most,
                     float & all_total, float * all_sum, int64_t width) {
        if (is_empty(most, total)) {
            return;
        }
        if (is_empty(all_most, all_total)) {
            all_most = most;
            all_total = total;
            std::copy(sum, sum + width, all_sum);
            return;
        }
        const float top = top_of(most > all_most ? most : all_most);
        const float before = exp_of(all_most - top), now = exp_of(most - top);
        all_total = all_total * before + total * now;
        for (int64_t j = 0; j < width; j += T) {
            const F kept = V::mul(V::load(all_sum + j), V::spread(before));
            V::store(all_sum + j, V::add(kept, V::mul(V::load(sum + j), V::spread(now))));
        }
        all_most = most > all_most ? most : all_most;
    }

    static void finish(const CellAttention & work, int64_t query, float most, float total,
                       float * sum, int64_t width) {
        const int64_t row = query / work.n_group, head = query % work.n_group;
        if (work.sinks != nullptr) {
            const float sink = work.sinks[head];
            if (sink > most) {
                const float by = exp_of(most - sink);
                total = total * by + 1.0f;
                scale_sum(sum, width, by);
            } else {
                total += exp_of(sink - most);
            }
        }
        for (int64_t j = 0; j < width; j += T) {
            V::store(sum + j, V::divide(V::load(sum + j), V::spread(total)));
        }
        std::memcpy(work.out + row * work.out_row + head * work.head_dim, sum,
                    work.head_dim * sizeof(float));
    }

    static void finish_all(const CellAttention & work, int64_t first, int64_t n,
                           const State & state, int64_t width) {
        for (int64_t i = 0; i < n; ++i) {
            finish(work, first + i, state.most[i], state.total[i], state.sum + i * width, width);
        }
    }

    // ---- a segment

    // Cells of a block of positions.
    struct Block {
        int64_t position;
        int64_t first, end; // places of those in the spans that some row sees
        bool has_gaps;
        int64_t first_open, end_open; // indices
        const char *k[BLOCK], *v[BLOCK];
        const char * rows[BLOCK];
        const char * const * values; // where sums read: `rows`, or `v`
    };

    struct OpenTile {
        const char *k[BLOCK], *v[BLOCK];
    };

    // How keys and values are kept for the queries at work, and whether values stay where they are.
    struct Kept {
        ggml_type k, v;
        bool v_in_place;
    };

    // A query's places in a block, and those from `own` on are open cells.
    struct Places {
        int64_t first, own, end;
        bool empty() const { return first >= end; }
    };

    static int64_t place(int64_t position, const Block & block) {
        return std::clamp<int64_t>(position - block.position, 0, BLOCK);
    }

    static Places places(const SeenRange & range, const Block & block) {
        return {place(range.first, block), place(range.spans_end, block), place(range.end, block)};
    }

    // The block at a position, of which positions from `low` on and before `last` are seen.
    static void find_block(const CellAttention & work, int64_t position, int64_t low, int64_t last,
                           Block & block, size_t & span) {
        block.position = position;
        block.first = place(low, block);
        block.end = std::max(block.first, place(last, block));
        find_cells(work, block, span);
    }

    // That which the first row sees first.
    static void find_first_block(const CellAttention & work, Block & block) {
        const SeenRange range = seen_range(work, 0);
        size_t span = 0;
        find_block(work, range.first / BLOCK * BLOCK, range.first, range.spans_end, block, span);
    }

    // Finds a block's cells in the spans; `span` is the first that may hold any, and moves on.
    static void find_cells(const CellAttention & work, Block & block, size_t & span) {
        const auto & spans = work.seen->spans;
        while (span < spans.size() && spans[span].position + spans[span].n <= block.position) {
            ++span;
        }
        int64_t done = 0; // places that are filled
        const auto leave_out = [&](int64_t end) {
            std::fill(block.k + done, block.k + end, nullptr);
            std::fill(block.v + done, block.v + end, nullptr);
            done = end;
        };
        leave_out(block.first);
        block.has_gaps = false;
        for (size_t i = span; i < spans.size() && done < block.end; ++i) {
            const int64_t from = spans[i].position - block.position;
            const int64_t first = std::max(from, block.first);
            const int64_t end = std::min(from + spans[i].n, block.end);
            if (first >= end) {
                continue;
            }
            block.has_gaps = block.has_gaps || first > done;
            leave_out(first);
            const int64_t cell = spans[i].cell - from;
            const char * k = work.k.first + (cell + first) * work.k.cell_bytes;
            const char * v = work.v.first + (cell + first) * work.v.cell_bytes;
            for (; done < end; ++done, k += work.k.cell_bytes, v += work.v.cell_bytes) {
                block.k[done] = k;
                block.v[done] = v;
            }
        }
        block.has_gaps = block.has_gaps || done < block.end;
        leave_out(BLOCK);
    }

    static void find_open(const CellAttention & work, Block & block) {
        const auto & open = work.seen->open;
        const auto n = static_cast<int64_t>(open.size());
        int64_t i = 0;
        while (i < n && open[i].position < block.position) {
            ++i;
        }
        block.first_open = i;
        while (i < n && open[i].position < block.position + BLOCK) {
            ++i;
        }
        block.end_open = i;
    }

    static void load_open(const CellAttention & work, const Block & block, const Kept & kept,
                          const Scratch & s) {
        const int64_t n = block.end_open - block.first_open;
        for (int64_t first = 0; first < n; first += BLOCK) {
            const int64_t here = std::min<int64_t>(BLOCK, n - first);
            OpenTile tile = {};
            for (int64_t c = 0; c < here; ++c) {
                const int64_t cell = work.seen->open[block.first_open + first + c].cell;
                tile.k[c] = work.k.first + cell * work.k.cell_bytes;
                tile.v[c] = work.v.first + cell * work.v.cell_bytes;
            }
            load_keys(work.k, tile.k, 0, here, kept.k, s, s.keys + (BLOCK + first) * s.width);
            load_values(work.v, tile.v, 0, here, kept.v_in_place, s,
                        s.values + (BLOCK + first) * s.width, s.open + first);
        }
    }

    // Queries that share registers.
    struct Tile {
        int64_t n, first_query;
        Places places[QUERIES];
    };

    template <class Value>
    static void add_tile(const CellAttention & work, const Block & block, const Tile & tile,
                         const SeenRange * ranges, int64_t first_row, const Scratch & s,
                         float * sums, Fetch & fetch) {
        // Cells that all see, among the spans, are read for all at once.
        int64_t first = 0, end = BLOCK;
        for (int64_t r = 0; r < tile.n; ++r) {
            first = std::max(first, tile.places[r].first);
            end = std::min({end, tile.places[r].own, tile.places[r].end});
        }
        const bool is_shared = first < end;
        if (!is_shared) {
            first = end = BLOCK;
        }
        const auto each_row = [&](auto && body) {
            for (int64_t r = 0; r < tile.n;) {
                const int64_t row = (tile.first_query + r) / work.n_group;
                int64_t next = r + 1;
                while (next < tile.n && (tile.first_query + next) / work.n_group == row) {
                    ++next;
                }
                body(row, r, next - r);
                r = next;
            }
        };
        const auto add = [&](int64_t r, int64_t n, const char * const * rows, int64_t from,
                             int64_t to) {
            add_all<Value>(n, s.scores + r * s.stride, s.stride, rows, from, to, sums + r * s.width,
                           s.width, fetch);
        };
        if (is_shared) {
            each_row([&](int64_t, int64_t r, int64_t n) {
                add(r, n, block.values, tile.places[r].first, first);
            });
            add(0, tile.n, block.values, first, end);
        }
        each_row([&](int64_t row, int64_t r, int64_t n) {
            const Places & at = tile.places[r];
            const int64_t from = is_shared ? end : at.first;
            add(r, n, block.values, from, std::min(at.own, at.end));
            if (at.own < at.end) {
                const SeenRange & range = ranges[row - first_row];
                const char * rows[BLOCK];
                const int64_t own = std::max(from, at.own);
                for (int64_t c = own; c < at.end; ++c) {
                    rows[c] = s.open[open_cell(work, range, block, c) - block.first_open];
                }
                add(r, n, rows, own, at.end);
            }
        });
    }

    // The open cell of a path at a place of a block.
    static int64_t open_cell(const CellAttention & work, const SeenRange & range,
                             const Block & block, int64_t place) {
        return work.seen->paths[range.path + block.position + place - range.spans_end];
    }

    // Cells that come after those of a block, as many at most, whose keys and values are asked for
    // while the block is at work.
    struct Ahead {
        int64_t n = 0;
        const char *k_cells[BLOCK], *v_cells[BLOCK];
        Fetch k, v;

        // Cells of a block from `first` on, as far as there is room. Returns how many.
        int64_t add(const Block & block, int64_t first) {
            const int64_t here = std::min(BLOCK - n, block.end - first);
            std::copy_n(block.k + first, here, k_cells + n);
            std::copy_n(block.v + first, here, v_cells + n);
            n += here;
            return here;
        }

        void begin(const CellAttention & work, const Scratch & s) {
            k = {k_cells, 0, n, static_cast<int64_t>(ggml_row_size(work.k.type, s.d))};
            v = {v_cells, 0, n, static_cast<int64_t>(ggml_row_size(work.v.type, s.d))};
        }
        void rest() {
            k.rest();
            v.rest();
        }
    };

    static Kept kept_for(const CellAttention & work, const Scratch & s, int64_t n_queries) {
        const ggml_type v = kept_type(work.v, s, n_queries);
        return {kept_type(work.k, s, n_queries), v, s.d == s.width && work.v.type == v};
    }

    // Positions [from, to) of queries [first, first + n), which s.q holds, to s.part.
    static void walk(const CellAttention & work, int64_t first, int64_t n, int64_t from, int64_t to,
                     const Scratch & s) {
        const int64_t first_row = first / work.n_group, last_row = (first + n - 1) / work.n_group;
        SeenRange ranges[MAX_QUERIES];
        int64_t low = INT64_MAX, high = 0, spans_end = 0;
        for (int64_t row = first_row; row <= last_row; ++row) {
            const SeenRange range = seen_range(work, row);
            ranges[row - first_row] = range;
            low = std::min(low, range.first);
            high = std::max(high, range.end);
            spans_end = std::max(spans_end, range.spans_end);
        }
        clear(s.part, n, s.width);
        const Kept kept = kept_for(work, s, n);
        const int64_t last = std::min(high, spans_end), stop = std::min(high, to);
        size_t span = 0;
        Block blocks[2], after;
        int64_t n_after = -1; // cells of `after`, of what is next, that were asked for
        int64_t at = std::max(low, from) / BLOCK * BLOCK;
        if (at < stop) {
            find_block(work, at, low, last, blocks[0], span);
            if (!work.is_fetched || at > low) {
                Ahead now;
                now.add(blocks[0], blocks[0].first);
                now.begin(work, s);
                now.rest();
            }
        }
        for (int i = 0; at < stop; at += BLOCK, i = 1 - i) {
            Block & block = blocks[i];
            find_open(work, block);
            load_keys(work.k, block.k, block.first, block.end, kept.k, s, s.keys);
            block.values = block.v;
            if (!kept.v_in_place || block.has_gaps) {
                block.values = block.rows;
                load_values(work.v, block.v, block.first, block.end, kept.v_in_place, s, s.values,
                            block.rows);
            }
            load_open(work, block, kept, s);
            Ahead ahead;
            Block & next = blocks[1 - i];
            if (at + BLOCK < high) {
                find_block(work, at + BLOCK, low, last, next, span);
                ahead.add(next, next.first);
            }
            if (at + 2 * BLOCK >= high && work.next != nullptr) {
                if (n_after < 0) {
                    find_first_block(*work.next, after);
                    n_after = 0;
                }
                n_after += ahead.add(after, after.first + n_after);
            }
            ahead.begin(work, s);
            for (int64_t r = 0; r < n; r += QUERIES) {
                walk_tile(work, block, first, r, std::min<int64_t>(QUERIES, n - r), ranges, kept, s,
                          ahead);
            }
            ahead.rest();
        }
    }

    static void walk_tile(const CellAttention & work, const Block & block, int64_t first, int64_t r,
                          int64_t n, const SeenRange * ranges, const Kept & kept, const Scratch & s,
                          Ahead & ahead) {
        const int64_t first_row = first / work.n_group;
        const auto range_of = [&](int64_t i) -> const SeenRange & {
            return ranges[(first + i) / work.n_group - first_row];
        };
        // Rows that see none of it may be the first or the last.
        while (n > 0 && places(range_of(r), block).empty()) {
            ++r;
            --n;
        }
        while (n > 0 && places(range_of(r + n - 1), block).empty()) {
            --n;
        }
        if (n == 0) {
            return;
        }
        Tile tile;
        tile.n = n;
        tile.first_query = first + r;
        const int64_t n_open = block.end_open - block.first_open;
        const float * q = s.q + r * s.d;
        with_type(kept.k, [&](auto of) {
            using Key = decltype(of);
            const auto keys_at = [&](int64_t c) {
                return reinterpret_cast<const Key *>(s.keys + c * s.width);
            };
            score_all(n, q, s.d, keys_at(0), block.first, block.end, s.scores, s.stride, ahead.k);
            for (int64_t c = 0; c < n_open; c += BLOCK) {
                score_all(n, q, s.d, keys_at(BLOCK + c), 0, std::min<int64_t>(BLOCK, n_open - c),
                          s.scores + BLOCK + c, s.stride, ahead.k);
            }
        });
        float largest[QUERIES];
        for (int64_t i = 0; i < n; ++i) {
            float * scores = s.scores + i * s.stride;
            Places & at = tile.places[i];
            at = places(range_of(r + i), block);
            if (at.empty()) {
                at = {0, 0, 0};
                continue;
            }
            for (int64_t c = at.first; c < at.end && c < at.own && block.has_gaps; ++c) {
                scores[c] = c < block.end && block.k[c] != nullptr ? scores[c] : -INFINITY;
            }
            for (int64_t c = std::max(at.first, at.own); c < at.end; ++c) {
                scores[c] =
                    scores[BLOCK + open_cell(work, range_of(r + i), block, c) - block.first_open];
            }
            largest[i] = largest_of(scores, at.first, at.end);
        }
        for (int64_t i = 0; i < n; ++i) {
            const Places & at = tile.places[i];
            if (!at.empty()) {
                weigh(s.scores + i * s.stride, at.first, at.end, largest[i], s.part.most[r + i],
                      s.part.total[r + i], s.part.sum + (r + i) * s.width, s.width);
            }
        }
        float * sums = s.part.sum + r * s.width;
        with_type(kept.v, [&](auto of) {
            add_tile<decltype(of)>(work, block, tile, ranges, first_row, s, sums, ahead.v);
        });
    }

    // ---- the kernel

    static Scratch start(const CellAttention & work, int64_t first, int64_t n, float * scratch) {
        const Scratch s(work.head_dim, static_cast<int64_t>(work.seen->open.size()), scratch);
        std::fill(s.zeros, s.zeros + s.width, 0.0f);
        for (int64_t i = 0; i < n; ++i) {
            const int64_t row = (first + i) / work.n_group, head = (first + i) % work.n_group;
            const float * from = work.q + row * work.q_row + head * work.q_head;
            for (int64_t j = 0; j < s.d; ++j) {
                s.q[i * s.d + j] = from[j] * work.scale;
            }
        }
        return s;
    }

    static void clear(const State & state, int64_t n, int64_t width) {
        std::fill(state.most, state.most + n, -INFINITY);
        std::fill(state.total, state.total + n, 0.0f);
        std::fill(state.sum, state.sum + n * width, 0.0f);
    }

    static void attend(const CellAttention & work, int64_t first, int64_t n, float * scratch) {
        const Scratch s = start(work, first, n, scratch);
        const SegmentRange range = seen_segments(work, first, n);
        if (range.end - range.first == 1) {
            walk(work, first, n, range.first * CELL_SEGMENT, range.end * CELL_SEGMENT, s);
            finish_all(work, first, n, s.part, s.width);
            return;
        }
        clear(s.all, n, s.width);
        for (int64_t segment = range.first; segment < range.end; ++segment) {
            walk(work, first, n, segment * CELL_SEGMENT, (segment + 1) * CELL_SEGMENT, s);
            for (int64_t i = 0; i < n; ++i) {
                fold(s.part.most[i], s.part.total[i], s.part.sum + i * s.width, s.all.most[i],
                     s.all.total[i], s.all.sum + i * s.width, s.width);
            }
        }
        finish_all(work, first, n, s.all, s.width);
    }

    static void segment(const CellAttention & work, int64_t first, int64_t n, int64_t segment,
                        float * parts, float * scratch) {
        const Scratch s = start(work, first, n, scratch);
        walk(work, first, n, segment * CELL_SEGMENT, (segment + 1) * CELL_SEGMENT, s);
        for (int64_t i = 0; i < n; ++i) {
            float * to = parts + i * part_size(s.d);
            std::copy(s.part.sum + i * s.width, s.part.sum + (i + 1) * s.width, to);
            to[s.width] = s.part.most[i];
            to[s.width + 1] = s.part.total[i];
        }
    }

    static void merge(const CellAttention & work, int64_t query, const float * parts,
                      int64_t n_parts, int64_t part_stride, float * scratch) {
        const Scratch s(work.head_dim, static_cast<int64_t>(work.seen->open.size()), scratch);
        clear(s.all, 1, s.width);
        for (int64_t i = 0; i < n_parts; ++i) {
            const float * part = parts + i * part_stride;
            fold(part[s.width], part[s.width + 1], part, s.all.most[0], s.all.total[0], s.all.sum,
                 s.width);
        }
        finish(work, query, s.all.most[0], s.all.total[0], s.all.sum, s.width);
    }

    static constexpr CellAttentionKernel kernel(const char * name) {
        return {name, scratch_size, part_size, attend, segment, merge};
    }
};

} // namespace
} // namespace dfl::cpu
