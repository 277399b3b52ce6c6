// CellAttentionKernel for vectors of V::T floats: visits visible cells in blocks of positions.
#pragma once

#include "cpu/attention/cell_attention.h"
#include "cpu/attention/cell_products.h"
#include "cpu/attention/cell_softmax.h"
#include "cpu/attention/cell_values.h"
#include "cpu/attention/cell_views.h"

#include <algorithm>
#include <cmath>

namespace dfl::cpu {
namespace {

template <class V>
struct CellAttentionTiles {
    using Values = CellValues<V>;
    using Products = CellProducts<V>;
    using Softmax = CellSoftmax<V>;
    static constexpr int T = V::T;
    static constexpr int BLOCK = CELL_BLOCK;
    static constexpr int QUERIES = Products::QUERIES;
    static constexpr int64_t PER_POINTER = sizeof(const char *) / sizeof(float);

    static int64_t n_tiles(int64_t n_cells) { return (n_cells + BLOCK - 1) / BLOCK; }

    // Running softmax of each query: largest score, sum of weights, weighted sum of values.
    struct State {
        float *maximum, *total, *sum;
    };

    struct Scratch {
        int64_t d, width;
        int64_t stride;
        float *q, *keys, *values, *rows, *scores, *zeros;
        const char ** pending; // addresses of the values of a block's pending cells
        State part, all;

        Scratch(int64_t head_dim, int64_t n_pending, float * at)
            : d(head_dim), width(Values::padded(head_dim)),
              stride(BLOCK * (1 + n_tiles(n_pending))) {
            const auto take = [&](int64_t n) {
                float * here = at;
                at += (n + 15) / 16 * 16;
                return here;
            };
            at += (64 - reinterpret_cast<uintptr_t>(at) % 64) % 64 / sizeof(float);
            q = take(MAX_QUERIES * d);
            keys = take(stride * width);
            values = take((BLOCK + n_pending) * width);
            rows = take(T * width);
            scores = take(QUERIES * stride);
            zeros = take(width);
            pending = reinterpret_cast<const char **>(take(n_pending * PER_POINTER));
            for (State * state : {&part, &all}) {
                *state = {take(MAX_QUERIES), take(MAX_QUERIES), take(MAX_QUERIES * width)};
            }
        }
    };

    static int64_t scratch_size(int64_t head_dim, int64_t n_pending) {
        const int64_t width = Values::padded(head_dim), stride = BLOCK * (1 + n_tiles(n_pending));
        const int64_t of_queries = MAX_QUERIES * (head_dim + 2 * width + 4);
        return of_queries + stride * width + (BLOCK + n_pending + T + 1) * width +
               QUERIES * stride + n_pending * PER_POINTER + 16 * 16; // 256 floats: alignment gaps
    }

    static int64_t part_size(int64_t head_dim) { return Values::padded(head_dim) + 2; }

    // Returns the type in which a block's keys or values are kept for n queries: the cache's, or
    // float. From about 50 queries on, converting 16-bit values to float beforehand is faster.
    static ggml_type kept_type(const CellRows & rows, const Scratch & s, int64_t n_queries) {
        const bool is_narrow = rows.type == GGML_TYPE_F16 || rows.type == GGML_TYPE_BF16;
        const bool stays = s.d == s.width && is_narrow && n_queries <= 8 * QUERIES;
        return stays ? rows.type : GGML_TYPE_F32;
    }

    // Transposes the keys of a vector of T cells to [width][T] at `to`, in rows BLOCK elements
    // apart. cells: addresses of the keys.
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

    // Copies keys of cells [first, end), transposed to [padded head size][BLOCK]; the key of a cell
    // with address NULL becomes zeros.
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
                    Values::read(k.type, from[i], s.d, row);
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
                transpose<typename V::F>(from, s.width, keys + c, [](const char * row, int64_t j) {
                    return Values::read(reinterpret_cast<const Value *>(row) + j);
                });
            });
        }
    }

    // Sets rows[c] to the address from which products read cell c's values: in the cache if
    // in_place, else in `values`, converted to float. A missing cell (NULL) has zeros.
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
                Values::read(v.type, cells[c], s.d, to);
                std::fill(to + s.d, to + s.width, 0.0f);
                rows[c] = reinterpret_cast<const char *>(to);
            }
        }
    }

    struct Block {
        int64_t position;
        int64_t first, end; // range of the block's cells that some query row sees
        bool has_gaps;
        int64_t first_pending, end_pending; // the block's range of VisibleCells::pending
        const char *k[BLOCK], *v[BLOCK];
        const char * rows[BLOCK];
        // Addresses from which products read values: `v` (in the cache), or `rows` if values were
        // converted to float or zeros stand for missing cells.
        const char * const * values;
    };

    struct PendingTile {
        const char *k[BLOCK], *v[BLOCK];
    };

    // Types of keys and values that products read. v_in_place: values in the cache, not converted.
    struct Kept {
        ggml_type k, v;
        bool v_in_place;
    };

    // Positions of a block that a query sees, counted from the block's start: [first, own) are in
    // spans, [own, end) in pending cells.
    struct Places {
        int64_t first, own, end;
        bool empty() const { return first >= end; }
    };

    static int64_t place(int64_t position, const Block & block) {
        return std::clamp<int64_t>(position - block.position, 0, BLOCK);
    }

    static Places places(const VisibleRange & range, const Block & block) {
        return {place(range.first, block), place(range.spans_end, block), place(range.end, block)};
    }

    // Fills `block` (BLOCK positions from `position` on) with span cells at positions [low, last).
    static void find_block(const CellAttention & work, int64_t position, int64_t low, int64_t last,
                           Block & block, size_t & span) {
        block.position = position;
        block.first = place(low, block);
        block.end = std::max(block.first, place(last, block));
        find_cells(work, block, span);
    }

    static void find_first_block(const CellAttention & work, Block & block) {
        const VisibleRange range = visible_range(work, 0);
        size_t span = 0;
        find_block(work, range.first / BLOCK * BLOCK, range.first, range.spans_end, block, span);
    }

    static void find_cells(const CellAttention & work, Block & block, size_t & span) {
        const auto & spans = work.visible->spans;
        while (span < spans.size() && spans[span].position + spans[span].n <= block.position) {
            ++span;
        }
        int64_t done = 0;
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

    static void find_pending(const CellAttention & work, Block & block) {
        const auto & open = work.visible->pending;
        const auto n = static_cast<int64_t>(open.size());
        int64_t i = 0;
        while (i < n && open[i].position < block.position) {
            ++i;
        }
        block.first_pending = i;
        while (i < n && open[i].position < block.position + BLOCK) {
            ++i;
        }
        block.end_pending = i;
    }

    static void load_pending(const CellAttention & work, const Block & block, const Kept & kept,
                             const Scratch & s) {
        const int64_t n = block.end_pending - block.first_pending;
        for (int64_t first = 0; first < n; first += BLOCK) {
            const int64_t here = std::min<int64_t>(BLOCK, n - first);
            PendingTile tile = {};
            for (int64_t c = 0; c < here; ++c) {
                const int64_t cell = work.visible->pending[block.first_pending + first + c].cell;
                tile.k[c] = work.k.first + cell * work.k.cell_bytes;
                tile.v[c] = work.v.first + cell * work.v.cell_bytes;
            }
            load_keys(work.k, tile.k, 0, here, kept.k, s, s.keys + (BLOCK + first) * s.width);
            load_values(work.v, tile.v, 0, here, kept.v_in_place, s,
                        s.values + (BLOCK + first) * s.width, s.pending + first);
        }
    }

    struct Tile {
        int64_t n, first_query;
        Places places[QUERIES];
    };

    template <class Value>
    static void add_tile(const CellAttention & work, const Block & block, const Tile & tile,
                         const VisibleRange * ranges, int64_t first_row, const Scratch & s,
                         float * sums, Fetch & fetch) {
        // Span cells that every query of the tile sees are read once for all queries.
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
            Products::template add_all<Value>(n, s.scores + r * s.stride, s.stride, rows, from, to,
                                              sums + r * s.width, s.width, fetch);
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
                const VisibleRange & range = ranges[row - first_row];
                const char * rows[BLOCK];
                const int64_t own = std::max(from, at.own);
                for (int64_t c = own; c < at.end; ++c) {
                    rows[c] = s.pending[pending_cell(work, range, block, c) - block.first_pending];
                }
                add(r, n, rows, own, at.end);
            }
        });
    }

    // Returns the index in VisibleCells::pending of the pending cell that a row sees at position
    // block.position + place.
    static int64_t pending_cell(const CellAttention & work, const VisibleRange & range,
                                const Block & block, int64_t place) {
        return work.visible->paths[range.path + block.position + place - range.spans_end];
    }

    // Up to BLOCK later cells, whose keys and values are prefetched while a block is computed.
    struct Ahead {
        int64_t n = 0;
        const char *k_cells[BLOCK], *v_cells[BLOCK];
        Fetch k, v;

        // Adds the block's cells, from its position `first` (counted from the block's start) on, to
        // the cells to prefetch, at most BLOCK in all. Returns the number of positions added.
        int64_t add(const Block & block, int64_t first) {
            const int64_t here = std::min(BLOCK - n, block.end - first);
            if (!block.has_gaps) {
                std::copy_n(block.k + first, here, k_cells + n);
                std::copy_n(block.v + first, here, v_cells + n);
                n += here;
                return here;
            }
            for (int64_t c = first; c < first + here; ++c) {
                if (block.k[c] != nullptr) {
                    k_cells[n] = block.k[c];
                    v_cells[n++] = block.v[c];
                }
            }
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

    // Attends n queries in s.q to positions [from, to); writes a partial result of each to s.part.
    static void attend_range(const CellAttention & work, int64_t first, int64_t n, int64_t from,
                             int64_t to, const Scratch & s) {
        const int64_t first_row = first / work.n_group, last_row = (first + n - 1) / work.n_group;
        VisibleRange ranges[MAX_QUERIES];
        int64_t low = INT64_MAX, high = 0, spans_end = 0;
        for (int64_t row = first_row; row <= last_row; ++row) {
            const VisibleRange range = visible_range(work, row);
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
        int64_t n_after = -1; // positions prefetched for the thread's next attention; -1: none yet
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
            find_pending(work, block);
            load_keys(work.k, block.k, block.first, block.end, kept.k, s, s.keys);
            block.values = block.v;
            if (!kept.v_in_place || block.has_gaps) {
                block.values = block.rows;
                load_values(work.v, block.v, block.first, block.end, kept.v_in_place, s, s.values,
                            block.rows);
            }
            load_pending(work, block, kept, s);
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
                attend_tile(work, block, first, r, std::min<int64_t>(QUERIES, n - r), ranges, kept,
                            s, ahead);
            }
            ahead.rest();
        }
    }

    static void attend_tile(const CellAttention & work, const Block & block, int64_t first,
                            int64_t r, int64_t n, const VisibleRange * ranges, const Kept & kept,
                            const Scratch & s, Ahead & ahead) {
        const int64_t first_row = first / work.n_group;
        const auto range_of = [&](int64_t i) -> const VisibleRange & {
            return ranges[(first + i) / work.n_group - first_row];
        };
        // Drops leading and trailing queries of the tile that see no position of the block.
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
        const int64_t n_pending = block.end_pending - block.first_pending;
        const float * q = s.q + r * s.d;
        with_type(kept.k, [&](auto of) {
            using Key = decltype(of);
            const auto keys_at = [&](int64_t c) {
                return reinterpret_cast<const Key *>(s.keys + c * s.width);
            };
            Products::score_all(n, q, s.d, keys_at(0), block.first, block.end, s.scores, s.stride,
                                ahead.k);
            for (int64_t c = 0; c < n_pending; c += BLOCK) {
                Products::score_all(n, q, s.d, keys_at(BLOCK + c), 0,
                                    std::min<int64_t>(BLOCK, n_pending - c), s.scores + BLOCK + c,
                                    s.stride, ahead.k);
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
                scores[c] = scores[BLOCK + pending_cell(work, range_of(r + i), block, c) -
                                   block.first_pending];
            }
            largest[i] = Softmax::largest_of(scores, at.first, at.end);
        }
        for (int64_t i = 0; i < n; ++i) {
            const Places & at = tile.places[i];
            if (!at.empty()) {
                Softmax::weigh(s.scores + i * s.stride, at.first, at.end, largest[i],
                               s.part.maximum[r + i], s.part.total[r + i],
                               s.part.sum + (r + i) * s.width, s.width);
            }
        }
        float * sums = s.part.sum + r * s.width;
        with_type(kept.v, [&](auto of) {
            add_tile<decltype(of)>(work, block, tile, ranges, first_row, s, sums, ahead.v);
        });
    }

    static Scratch start(const CellAttention & work, int64_t first, int64_t n, float * scratch) {
        const Scratch s(work.head_dim, static_cast<int64_t>(work.visible->pending.size()), scratch);
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

    static void finish_all(const CellAttention & work, int64_t first, int64_t n,
                           const State & state, int64_t width) {
        for (int64_t i = 0; i < n; ++i) {
            Softmax::finish(work, first + i, state.maximum[i], state.total[i],
                            state.sum + i * width, width);
        }
    }

    static void clear(const State & state, int64_t n, int64_t width) {
        std::fill(state.maximum, state.maximum + n, -INFINITY);
        std::fill(state.total, state.total + n, 0.0f);
        std::fill(state.sum, state.sum + n * width, 0.0f);
    }

    static void attend(const CellAttention & work, int64_t first, int64_t n, float * scratch) {
        const Scratch s = start(work, first, n, scratch);
        const SegmentRange range = visible_segments(work, first, n);
        if (range.end - range.first == 1) {
            attend_range(work, first, n, range.first * CELL_SEGMENT, range.end * CELL_SEGMENT, s);
            finish_all(work, first, n, s.part, s.width);
            return;
        }
        clear(s.all, n, s.width);
        for (int64_t segment = range.first; segment < range.end; ++segment) {
            attend_range(work, first, n, segment * CELL_SEGMENT, (segment + 1) * CELL_SEGMENT, s);
            for (int64_t i = 0; i < n; ++i) {
                Softmax::fold(s.part.maximum[i], s.part.total[i], s.part.sum + i * s.width,
                              s.all.maximum[i], s.all.total[i], s.all.sum + i * s.width, s.width);
            }
        }
        finish_all(work, first, n, s.all, s.width);
    }

    static void segment(const CellAttention & work, int64_t first, int64_t n, int64_t segment,
                        float * parts, float * scratch) {
        const Scratch s = start(work, first, n, scratch);
        attend_range(work, first, n, segment * CELL_SEGMENT, (segment + 1) * CELL_SEGMENT, s);
        for (int64_t i = 0; i < n; ++i) {
            float * to = parts + i * part_size(s.d);
            std::copy(s.part.sum + i * s.width, s.part.sum + (i + 1) * s.width, to);
            to[s.width] = s.part.maximum[i];
            to[s.width + 1] = s.part.total[i];
        }
    }

    static void merge(const CellAttention & work, int64_t query, const float * parts,
                      int64_t n_parts, int64_t part_stride, float * scratch) {
        const Scratch s(work.head_dim, static_cast<int64_t>(work.visible->pending.size()), scratch);
        clear(s.all, 1, s.width);
        for (int64_t i = 0; i < n_parts; ++i) {
            const float * part = parts + i * part_stride;
            Softmax::fold(part[s.width], part[s.width + 1], part, s.all.maximum[0], s.all.total[0],
                          s.all.sum, s.width);
        }
        Softmax::finish(work, query, s.all.maximum[0], s.all.total[0], s.all.sum, s.width);
    }

    static constexpr CellAttentionKernel KERNEL = {scratch_size, part_size, attend, segment, merge};
};

} // namespace
} // namespace dfl::cpu
