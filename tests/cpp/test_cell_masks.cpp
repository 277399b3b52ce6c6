// Cell masks for devices, and visible ranges for the CPU, compared with a direct definition of
// visibility over random passes; and the bytes written to masks in a round.
#include "cache/cell_masks.h"
#include "cache/visible_cells.h"
#include "check.h"
#include "cpu/attention/cell_views.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <random>

using namespace dfl;

namespace {

constexpr int32_t N_SEQUENCES = 3;
constexpr int64_t MOST_ROWS = 24;

// Layers with full attention, with two windows, and with two kinds of non-causal attention.
Hparams layers() {
    Hparams hp;
    for (const auto & [window, causal] : {std::pair<int, bool>{0, true},
                                          {7, true},
                                          {0, true},
                                          {30, true},
                                          {0, false},
                                          {5, false}}) {
        LayerShape layer;
        layer.window = window;
        layer.causal = causal;
        hp.layers.push_back(layer);
        hp.layers.push_back({});
        hp.layers.back().recurrent = true;
    }
    return hp;
}

// Sequences that take cells as an engine's do. Methods act on the sequence `line`.
class Timelines {
  public:
    Timelines(int64_t n_cells, unsigned seed)
        : hp_(layers()), backend_(cpu_device(), 1), table_(n_cells, N_SEQUENCES),
          masks_(
              hp_, {0, 2, 4, 6, 8, 10}, [&](int64_t) -> Backend & { return backend_; }, n_cells,
              MOST_ROWS / 2),
          n_cells_(n_cells), random_(seed) {
        masks_.reserve(MOST_ROWS);
    }

    int below(int n) { return static_cast<int>(random_() % n); }
    int32_t position() const { return positions_[line]; }
    bool has_room() const {
        return table_.cells_needed(line, MOST_ROWS + 1) <= table_.n_unclaimed();
    }
    uint64_t bytes_written() const { return masks_.bytes_written(); }

    int32_t line = 0;

    void append(int64_t n, bool check) {
        const std::vector<int32_t> positions = following(n);
        const std::vector<int64_t> cells = take(positions);
        pass({positions, cells, {{line, 0, n, nullptr}}}, check);
        positions_[line] += n;
    }

    // Runs a block of n rows and drops it, as a drafter does.
    void block(int64_t n) {
        const std::vector<int32_t> positions = following(n);
        const std::vector<int64_t> cells = take(positions);
        pass({positions, cells, {{line, 0, n, nullptr}}}, true);
        release(cells);
    }

    // Appends one row to `line` beside temporary blocks of the other sequences.
    void together() {
        std::vector<int32_t> positions;
        std::vector<int64_t> cells;
        std::vector<SequenceRows> rows;
        const int32_t chosen = line;
        for (line = 0; line < N_SEQUENCES; ++line) {
            const int64_t n = line == chosen ? 1 : 1 + below(4);
            if (table_.cells_needed(line, n) > table_.n_unclaimed()) {
                continue;
            }
            const std::vector<int32_t> here = following(n);
            const std::vector<int64_t> taken = take(here);
            rows.push_back({line, static_cast<int64_t>(positions.size()), n, nullptr});
            positions.insert(positions.end(), here.begin(), here.end());
            cells.insert(cells.end(), taken.begin(), taken.end());
        }
        if (!rows.empty()) {
            pass({positions, cells, rows}, true);
        }
        for (const SequenceRows & of : rows) {
            line = of.sequence;
            if (line == chosen) {
                ++positions_[line];
            } else {
                release({cells.begin() + of.first, cells.begin() + of.first + of.n});
            }
        }
        line = chosen;
    }

    // Verifies a random tree of n nodes with padding rows, then commits n_accepted nodes of a path.
    void round(int64_t n, int64_t n_padding, bool moves_rows, bool check) {
        std::vector<int32_t> tokens(n, 7), parents(n), path = {0};
        for (int32_t i = 0; i < n; ++i) {
            parents[i] = i == 0 ? -1 : i - 1 - below(std::min(i, 3));
            if (i > 0 && parents[i] == path.back()) {
                path.push_back(i);
            }
        }
        const Tree tree(tokens.data(), parents.data(), n);
        std::vector<int32_t> positions;
        for (int64_t i = 0; i < n; ++i) {
            positions.push_back(position() + tree.depth(i));
        }
        std::vector<int64_t> cells = table_.take(line, n + (n_padding > 0));
        const std::vector<int64_t> taken = cells;
        if (n_padding > 0) {
            positions.resize(n + n_padding, position());
            cells.resize(n + n_padding, cells.back());
        }
        pass({positions, cells, {{line, 0, n, &tree}}}, check);
        path.resize(below(path.size() + 1));
        for (size_t i = 0; i < path.size(); ++i) {
            table_.place(cells[moves_rows ? i : path[i]], positions_[line]++);
        }
        for (const int64_t cell : taken) {
            if (table_.position(cell) == CellTable::FREE) {
                table_.release(cell);
            }
        }
    }

    void truncate(int32_t position) {
        table_.release_from(line, position);
        positions_[line] = position;
    }

    void forget_before(int32_t position) { table_.release_before(line, position); }

  private:
    struct Rows {
        std::vector<int32_t> positions;
        std::vector<int64_t> cells;
        std::vector<SequenceRows> sequences;
    };

    std::vector<int32_t> following(int64_t n) const {
        std::vector<int32_t> positions(n);
        std::iota(positions.begin(), positions.end(), position());
        return positions;
    }

    std::vector<int64_t> take(const std::vector<int32_t> & positions) {
        const std::vector<int64_t> cells = table_.take(line, positions.size());
        for (size_t i = 0; i < cells.size(); ++i) {
            table_.place(cells[i], positions[i]);
        }
        return cells;
    }

    void release(const std::vector<int64_t> & cells) {
        for (const int64_t cell : cells) {
            table_.release(cell);
        }
    }

    // Updates masks over the cells in use (if few) or all cells, then compares every element.
    void pass(const Rows & all, bool check) {
        const MaskRows rows = {all.positions, all.cells, all.sequences};
        const int64_t high = (table_.high() + 32) / 32 * 32;
        const bool is_short = n_cells_ <= 256 && below(8) > 0;
        const int64_t n_kv = is_short ? std::min(high, n_cells_) : n_cells_;
        masks_.update(table_, rows, n_kv);
        if (!check) {
            return;
        }
        const auto n_rows = static_cast<int64_t>(rows.positions.size());
        ggml_context_ptr ctx(ggml_init({16 * ggml_tensor_overhead(), nullptr, true}));
        const std::vector<ggml_tensor *> views = masks_.views(ctx.get(), n_kv, n_rows);
        for (int64_t il = 0; il < hp_.n_layer(); il += 2) {
            CHECK(masks_.index(il + 1) == -1);
            const auto * mask = static_cast<const ggml_fp16_t *>(views[masks_.index(il)]->data);
            for (int64_t i = 0; i < n_rows; ++i) {
                for (int64_t cell = 0; cell < n_kv; ++cell) {
                    const float value = ggml_fp16_to_fp32(mask[i * n_kv + cell]);
                    CHECK(value == (sees(hp_.layers[il], rows, i, cell) ? 0.0f : -INFINITY));
                }
            }
        }
        check_seen(rows);
    }

    void check_seen(const MaskRows & rows) {
        std::vector<VisibleRows> all;
        find_visible_cells(table_, rows, all);
        CHECK(all.size() == rows.sequences.size());
        for (const VisibleRows & of : all) {
            check_seen(rows, of);
        }
    }

    void check_seen(const MaskRows & rows, const VisibleRows & of) {
        CHECK(static_cast<int64_t>(of.cells.rows.size()) == of.n);
        for (int64_t il = 0; il < hp_.n_layer(); il += 2) {
            const LayerShape & layer = hp_.layers[il];
            if (!layer.causal && rows.sequences[0].tree != nullptr) {
                continue; // drafters with non-causal layers never verify
            }
            cpu::CellAttention work = {};
            work.visible = &of.cells;
            work.window = layer.window;
            work.causal = layer.causal;
            for (int64_t i = 0; i < of.n; ++i) {
                const std::vector<int64_t> cells = cells_of(cpu::visible_range(work, i), of.cells);
                std::vector<int64_t> expected;
                for (int64_t cell = 0; cell < n_cells_; ++cell) {
                    if (sees(layer, rows, of.first + i, cell)) {
                        expected.push_back(cell);
                    }
                }
                CHECK(std::is_permutation(cells.begin(), cells.end(), expected.begin(),
                                          expected.end()));
            }
        }
    }

    static std::vector<int64_t> cells_of(const cpu::VisibleRange & range,
                                         const cpu::VisibleCells & visible) {
        std::vector<int64_t> cells;
        int64_t last = -1;
        for (const cpu::CellSpan & span : visible.spans) {
            CHECK(span.position > last && span.n > 0);
            last = span.position + span.n - 1;
            for (int64_t i = 0; i < span.n; ++i) {
                const int64_t position = span.position + i;
                if (position >= range.first && position < range.end && position < range.spans_end) {
                    cells.push_back(span.cell + i);
                }
            }
        }
        for (int64_t position = std::max(range.first, range.spans_end); position < range.end;
             ++position) {
            const auto & open =
                visible.pending[visible.paths[range.path + position - range.spans_end]];
            CHECK(open.position == position);
            cells.push_back(open.cell);
        }
        return cells;
    }

    bool sees(const LayerShape & layer, const MaskRows & rows, int64_t i, int64_t cell) const {
        const int32_t own = rows.positions[i];
        auto reaches = [&](int32_t other) {
            return (layer.window == 0 || std::abs(own - other) < layer.window) &&
                   (!layer.causal || other <= own);
        };
        const SequenceRows * of = &rows.sequences.back();
        while (i < of->first) {
            --of;
        }
        if (of->tree != nullptr) {
            const int32_t start = i < of->n ? static_cast<int32_t>(i) : 0;
            for (int32_t node = start; node >= 0; node = of->tree->parent(node)) {
                if (rows.cells[node] == cell) {
                    return reaches(rows.positions[node]);
                }
            }
        }
        return table_.sequence(cell) == of->sequence && table_.position(cell) != CellTable::FREE &&
               reaches(table_.position(cell));
    }

    Hparams hp_;
    Backend backend_;
    CellTable table_;
    CellMasks masks_;
    int64_t n_cells_;
    int32_t positions_[N_SEQUENCES] = {};
    std::mt19937 random_;
};

void random_passes(unsigned seed) {
    Timelines line(256, seed);
    for (int step = 0; step < 150; ++step) {
        const int64_t n = 1 + line.below(MOST_ROWS);
        line.line = line.below(N_SEQUENCES);
        if (!line.has_room()) {
            line.truncate(line.below(line.position() + 1));
        }
        if (!line.has_room()) {
            continue;
        }
        switch (line.below(9)) {
        case 0:
            line.append(n, true);
            break;
        case 1:
            line.append(1, true);
            break;
        case 2:
            line.block(n);
            break;
        case 3:
            line.truncate(line.position() - line.below(std::min(line.position() + 1, 9)));
            break;
        case 4:
            line.forget_before(line.position() - 40);
            break;
        case 5:
            line.together();
            break;
        default:
            line.round(n, line.below(2) * line.below(MOST_ROWS - n + 1), line.below(2) == 1, true);
        }
    }
}

// Mask rows that missed more changes than are logged are rewritten in full.
void rows_that_rested() {
    Timelines line(16384, 3);
    line.round(MOST_ROWS, 0, true, true);
    for (int step = 0; step < 12000; ++step) {
        line.append(1, false);
    }
    line.round(MOST_ROWS, 0, true, true);
}

uint64_t bytes_a_round(int64_t n_cells) {
    Timelines line(n_cells, 5);
    while (line.position() < n_cells / 2) {
        line.append(MOST_ROWS, false);
    }
    const uint64_t before = line.bytes_written();
    constexpr int n_rounds = 32;
    for (int i = 0; i < n_rounds; ++i) {
        line.round(MOST_ROWS, 0, false, false);
    }
    return (line.bytes_written() - before) / n_rounds;
}

void a_round_writes_no_more_after_a_longer_timeline() {
    const uint64_t after_2048 = bytes_a_round(4096);
    CHECK(after_2048 < 5 * MOST_ROWS * 400 * sizeof(ggml_fp16_t));
    CHECK(bytes_a_round(131072) == after_2048);
}

} // namespace

int main() {
    for (unsigned seed = 0; seed < 30; ++seed) {
        random_passes(seed);
    }
    rows_that_rested();
    a_round_writes_no_more_after_a_longer_timeline();
}
