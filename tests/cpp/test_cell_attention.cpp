// CPU attention over K/V cells: compared with double precision, and batch-invariant.
#include "cpu/isa/kernels.h"

#include "check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <ggml.h>
#include <numeric>
#include <random>
#include <vector>

using namespace dfl;

namespace {

constexpr int64_t N_KV_HEADS = 2;

struct Case {
    int64_t head_dim, n_group, n_positions;
    ggml_type type = GGML_TYPE_F16;
    int64_t window = 0;
    bool causal = true, sinks = false;
};

// Queries, keys and values by position, with keys and values copied into K/V cells.
struct Data {
    Case shape;
    std::vector<float> q, k, v, sinks; // shapes: [position][head][head_dim]
    std::vector<char> k_cells, v_cells;
    cpu::VisibleCells visible;
    std::vector<int64_t> query_of; // position of each row's query
    std::vector<float> out;

    explicit Data(const Case & shape) : shape(shape) {
        std::mt19937 random(5);
        std::normal_distribution<float> normal;
        const auto floats = [&](int64_t n) {
            std::vector<float> x(n);
            std::generate(x.begin(), x.end(), [&] { return normal(random); });
            return x;
        };
        q = floats(shape.n_positions * n_heads() * shape.head_dim);
        k = floats(shape.n_positions * row_size());
        v = floats(shape.n_positions * row_size());
        sinks = floats(n_heads());
        k_cells.resize((2 * shape.n_positions + 16) * cell_bytes());
        v_cells.resize(k_cells.size());
    }

    int64_t n_heads() const { return N_KV_HEADS * shape.n_group; }
    int64_t row_size() const { return N_KV_HEADS * shape.head_dim; }
    size_t cell_bytes() const { return ggml_row_size(shape.type, row_size()); }

    static void write(ggml_type type, const float * row, int64_t n, char * to) {
        if (type == GGML_TYPE_F32) {
            std::memcpy(to, row, n * sizeof(float));
        } else {
            ggml_get_type_traits(type)->from_float_ref(row, to, n);
        }
    }

    void put(int64_t position, int64_t cell) {
        write(shape.type, k.data() + position * row_size(), row_size(),
              k_cells.data() + cell * cell_bytes());
        write(shape.type, v.data() + position * row_size(), row_size(),
              v_cells.data() + cell * cell_bytes());
    }

    void fill_with_nan(int64_t cell) {
        std::memset(k_cells.data() + cell * cell_bytes(), 0xff, cell_bytes());
        std::memset(v_cells.data() + cell * cell_bytes(), 0xff, cell_bytes());
    }

    // Lays out rows at positions [first, end) of a chain, in at most n_pieces spans of cells.
    void lay_chain(int64_t first, int64_t end, int64_t n_pieces = 1) {
        for (int64_t cell = 0; cell < 2 * shape.n_positions; ++cell) {
            fill_with_nan(cell);
        }
        visible = {};
        query_of.clear();
        const int64_t size = (end + n_pieces - 1) / n_pieces;
        for (int64_t at = 0; at < end; at += size) {
            const int64_t n = std::min(size, end - at), cell = 2 * shape.n_positions - at - n;
            visible.spans.push_back({at, cell, n});
            for (int64_t i = 0; i < n; ++i) {
                put(at + i, cell + i);
            }
        }
        for (int64_t position = first; position < end; ++position) {
            visible.rows.push_back({position, position + 1, 0});
            query_of.push_back(position);
        }
    }

    // Lays out a tree after `start` positions. Node i of the main chain (`spine`) has the key and
    // value of position start + depth(i); the cells of all other nodes hold NaN.
    void lay_tree(int64_t start, const std::vector<int> & parents,
                  const std::vector<bool> & spine) {
        lay_chain(start, start, 1);
        for (int64_t i = 0; i < start; ++i) {
            put(i, i);
        }
        visible.spans = {{0, 0, start}};
        std::vector<int64_t> depth(parents.size(), 0), order(parents.size());
        for (size_t i = 1; i < parents.size(); ++i) {
            depth[i] = depth[parents[i]] + 1;
        }
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](int64_t a, int64_t b) { return depth[a] < depth[b]; });
        std::vector<int32_t> place(parents.size());
        for (size_t i = 0; i < order.size(); ++i) {
            const int64_t node = order[i], cell = start + 3 + node;
            place[node] = static_cast<int32_t>(i);
            visible.pending.push_back({start + depth[node], cell});
            spine[node] ? put(start + depth[node], cell) : fill_with_nan(cell);
        }
        for (size_t i = 0; i < parents.size(); ++i) {
            visible.rows.push_back(
                {start + depth[i], start, static_cast<int64_t>(visible.paths.size())});
            query_of.push_back(start + depth[i]);
            std::vector<int32_t> path;
            for (int node = static_cast<int>(i); node >= 0; node = parents[node]) {
                path.push_back(place[node]);
            }
            visible.paths.insert(visible.paths.end(), path.rbegin(), path.rend());
        }
    }

    cpu::CellAttention work(int64_t kv_head, const std::vector<float> & queries) {
        const int64_t d = shape.head_dim;
        const size_t at = ggml_row_size(shape.type, kv_head * d);
        cpu::CellAttention w;
        w.head_dim = d;
        w.n_group = shape.n_group;
        w.q = queries.data() + kv_head * shape.n_group * d;
        w.q_head = d;
        w.q_row = w.out_row = n_heads() * d;
        w.k = {k_cells.data() + at, cell_bytes(), shape.type};
        w.v = {v_cells.data() + at, cell_bytes(), shape.type};
        w.visible = &visible;
        w.window = shape.window;
        w.causal = shape.causal;
        w.scale = 1 / std::sqrt(float(d));
        w.sinks = shape.sinks ? sinks.data() + kv_head * shape.n_group : nullptr;
        w.out = out.data() + kv_head * shape.n_group * d;
        return w;
    }

    std::vector<float> queries() const {
        const int64_t size = n_heads() * shape.head_dim;
        std::vector<float> rows;
        for (const int64_t position : query_of) {
            rows.insert(rows.end(), q.begin() + position * size, q.begin() + (position + 1) * size);
        }
        return rows;
    }

    // Computes attention of all rows, at_once queries per call; per segment, then merged, if split.
    std::vector<float> attended(const cpu::CellAttentionKernel & kernel, int64_t at_once,
                                bool split = false) {
        const auto n_pending = static_cast<int64_t>(visible.pending.size());
        std::vector<float> scratch(kernel.scratch_size(shape.head_dim, n_pending));
        const std::vector<float> rows = queries();
        out.assign(rows.size(), NAN);
        const int64_t n = static_cast<int64_t>(query_of.size()) * shape.n_group;
        for (int64_t head = 0; head < N_KV_HEADS; ++head) {
            cpu::CellAttention w = work(head, rows);
            for (int64_t first = 0; first < n; first += at_once) {
                const int64_t here = std::min(at_once, n - first);
                if (!split) { // prefetches the next head's cells, as threads of a pass do
                    const bool ends = first + here == n;
                    const cpu::CellAttention next =
                        ends && head + 1 < N_KV_HEADS ? work(head + 1, rows) : work(head, rows);
                    w.next = ends && head + 1 == N_KV_HEADS ? nullptr : &next;
                    w.is_fetched = head + first > 0;
                    kernel.attend(w, first, here, scratch.data());
                    continue;
                }
                const cpu::SegmentRange range = cpu::visible_segments(w, first, here);
                const int64_t size = kernel.part_size(shape.head_dim),
                              n_parts = range.end - range.first;
                std::vector<float> parts(here * size * n_parts);
                for (int64_t i = n_parts - 1; i >= 0; --i) {
                    kernel.segment(w, first, here, range.first + i, parts.data() + i * here * size,
                                   scratch.data());
                }
                for (int64_t i = 0; i < here; ++i) {
                    kernel.merge(w, first + i, parts.data() + i * size, n_parts, here * size,
                                 scratch.data());
                }
            }
        }
        return out;
    }

    int64_t at(int64_t row) const { return row * n_heads() * shape.head_dim; }

    // Returns the output of one head for one row of a chain that lies in a single span.
    std::vector<double> expected(int64_t row, int64_t head) const {
        const int64_t d = shape.head_dim, kv = head / shape.n_group * d;
        const int64_t position = visible.rows[row].position, n = visible.spans.front().n;
        const int64_t window = shape.window > 0 ? shape.window : INT32_MAX;
        const float * query = q.data() + (query_of[row] * n_heads() + head) * d;
        std::vector<double> sum(d, 0.0);
        double total = shape.sinks ? std::exp(sinks[head]) : 0.0;
        for (int64_t p = 0; p < n; ++p) {
            if (std::abs(p - position) >= window || (shape.causal && p > position)) {
                continue;
            }
            const int64_t cell = visible.spans.front().cell + p;
            std::vector<float> key(row_size()), value(row_size());
            const auto whole = [&](const std::vector<char> & cells, std::vector<float> & to) {
                const char * from = cells.data() + cell * cell_bytes();
                if (shape.type == GGML_TYPE_F32) {
                    std::memcpy(to.data(), from, to.size() * sizeof(float));
                } else {
                    ggml_get_type_traits(shape.type)->to_float(from, to.data(), row_size());
                }
            };
            whole(k_cells, key);
            whole(v_cells, value);
            double score = 0;
            for (int64_t j = 0; j < d; ++j) {
                score += double(query[j]) * key[kv + j];
            }
            const double weight = std::exp(score / std::sqrt(double(d)));
            total += weight;
            for (int64_t j = 0; j < d; ++j) {
                sum[j] += weight * value[kv + j];
            }
        }
        for (double & x : sum) {
            x /= total;
        }
        return sum;
    }
};

void agrees_with_double_precision(const cpu::CellAttentionKernel & kernel, const Case & shape,
                                  int64_t first) {
    Data data(shape);
    data.lay_chain(first, shape.n_positions);
    const std::vector<float> all = data.attended(kernel, cpu::MAX_QUERIES);
    const auto n_rows = static_cast<int64_t>(data.query_of.size());
    for (int64_t row = 0; row < n_rows; row += std::max<int64_t>(1, n_rows / 5)) {
        for (int64_t head = 0; head < data.n_heads(); ++head) {
            const std::vector<double> expected = data.expected(row, head);
            for (int64_t j = 0; j < shape.head_dim; ++j) {
                // Observed error: 4e-6. A cell left out or counted twice would give 1e-3.
                const double found = all[data.at(row) + head * shape.head_dim + j];
                CHECK(std::fabs(found - expected[j]) < 3e-5);
            }
        }
    }
    // Batches of 49 queries and more take the path that widens 16-bit keys and values first.
    for (const int64_t at_once : {1, 5, 7, 48, 49, 64}) {
        CHECK(data.attended(kernel, at_once) == all);
    }
    CHECK(data.attended(kernel, cpu::MAX_QUERIES, /*split =*/true) == all);
    if (shape.causal) {
        data.lay_chain(first, shape.n_positions, 7);
        CHECK(data.attended(kernel, cpu::MAX_QUERIES) == all);
        Data one(shape); // cells after the row's position stay NaN
        for (int64_t row = 0; row < n_rows; row += std::max<int64_t>(1, n_rows / 3)) {
            one.lay_chain(first + row, first + row + 1);
            const std::vector<float> found = one.attended(kernel, cpu::MAX_QUERIES);
            CHECK(std::equal(found.begin(), found.end(), all.begin() + data.at(row)));
        }
    }
}

// Tree nodes give the bits of plain decoding, even if their siblings are not finite.
void nodes_are_steps(const cpu::CellAttentionKernel & kernel, const Case & shape, int64_t start) {
    // Main chain: nodes 0, 1, 3, 4, 6, 8.
    const std::vector<int> parents = {-1, 0, 0, 1, 3, 2, 4, 1, 6, 5, 8};
    const std::vector<bool> spine = {1, 1, 0, 1, 1, 0, 1, 0, 1, 0, 0};
    Data tree(shape), chain(shape);
    tree.lay_tree(start, parents, spine);
    chain.lay_chain(start, start + 6);
    const std::vector<float> expected = chain.attended(kernel, cpu::MAX_QUERIES);
    for (const int64_t at_once : {1, 4, 96}) {
        for (const bool split : {false, true}) {
            const std::vector<float> found = tree.attended(kernel, at_once, split);
            int64_t depth = 0;
            for (size_t i = 0; i < parents.size(); ++i) {
                if (spine[i]) {
                    CHECK(std::equal(expected.begin() + chain.at(depth),
                                     expected.begin() + chain.at(depth + 1),
                                     found.begin() + tree.at(i)));
                    ++depth;
                }
            }
        }
    }
}

// Positions missing from a drafter's K/V have no weight in the softmax.
void missing_positions_are_not_seen(const cpu::CellAttentionKernel & kernel) {
    const Case shape = {64, 2, 300};
    Data whole(shape), holed(shape);
    whole.lay_chain(299, 300);
    holed.lay_chain(299, 300);
    const int64_t cell = holed.visible.spans[0].cell;
    holed.visible.spans = {{0, cell, 70}, {200, cell + 200, 100}};
    const std::vector<float> found = holed.attended(kernel, 1);
    for (int64_t p = 70; p < 200; ++p) { // keys whose scores give a softmax weight of 0
        for (int64_t j = 0; j < whole.row_size(); ++j) {
            whole.k[p * whole.row_size() + j] =
                -1e4f * whole.q[299 * 4 * 64 + j / 64 * 128 + j % 64];
        }
        whole.put(p, cell + p);
    }
    const std::vector<float> expected = whole.attended(kernel, 1);
    for (const int64_t head : {0, 2}) {
        CHECK(std::equal(found.begin() + head * 64, found.begin() + head * 64 + 64,
                         expected.begin() + head * 64));
    }
}

// A non-finite K/V row makes exactly the rows non-finite that attend to it.
void what_is_seen_and_not_finite_is_told(const cpu::CellAttentionKernel & kernel) {
    Data data({64, 2, 200});
    data.lay_chain(100, 200);
    data.fill_with_nan(data.visible.spans[0].cell + 150);
    const std::vector<float> all = data.attended(kernel, cpu::MAX_QUERIES);
    for (int64_t row = 0; row < 100; ++row) {
        CHECK(std::isfinite(all[data.at(row)]) == (row < 50));
    }
}

} // namespace

int main() {
    for (const cpu::Kernels & set : cpu::kernels()) {
        const cpu::CellAttentionKernel * kernel = set.attention;
        if (kernel == nullptr) {
            continue;
        }
        agrees_with_double_precision(*kernel, {64, 3, 300}, 260);
        agrees_with_double_precision(*kernel, {128, 1, 65}, 0);
        agrees_with_double_precision(*kernel, {20, 2, 140, GGML_TYPE_F32}, 100);
        agrees_with_double_precision(*kernel, {80, 4, 129, GGML_TYPE_BF16}, 125);
        agrees_with_double_precision(*kernel, {64, 4, 129, GGML_TYPE_BF16}, 100);
        agrees_with_double_precision(*kernel, {96, 2, 150, GGML_TYPE_Q8_0}, 120);
        agrees_with_double_precision(*kernel, {512, 1, 70, GGML_TYPE_F32}, 60);
        agrees_with_double_precision(*kernel, {64, 2, 5000}, 4990);
        agrees_with_double_precision(*kernel, {64, 2, 2300, GGML_TYPE_F16, 130, true, true}, 2000);
        agrees_with_double_precision(*kernel, {32, 1, 500, GGML_TYPE_F16, 40, false, true}, 480);
        agrees_with_double_precision(*kernel, {32, 2, 90, GGML_TYPE_F16, 0, false}, 70);
        for (const ggml_type type : {GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1,
                                     GGML_TYPE_IQ4_NL, GGML_TYPE_Q8_0}) {
            agrees_with_double_precision(*kernel, {64, 2, 100, type}, 90);
        }
        for (const int64_t start : {0, 3, 60, 64, 200, 2045}) {
            nodes_are_steps(*kernel, {64, 3, start + 7}, start);
        }
        nodes_are_steps(*kernel, {40, 2, 134, GGML_TYPE_F32, 3}, 127);
        nodes_are_steps(*kernel, {64, 4, 134, GGML_TYPE_Q8_0, 70, true, true}, 127);
        missing_positions_are_not_seen(*kernel);
        what_is_seen_and_not_finite_is_told(*kernel);
    }
}
