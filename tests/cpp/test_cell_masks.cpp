// Kept masks against masks written anew, over random passes; and what keeping them saves.
#include "cache/cell_masks.h"
#include "check.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <random>

using namespace dfl;

namespace {

constexpr int32_t OTHERS = 1; // nodes of a verify
constexpr int64_t MOST_ROWS = 24;

// Full attention, two windows, and two kinds of layers that see what comes after.
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

// A timeline whose rows take cells as a sequence's do.
class Timeline {
  public:
    Timeline(int64_t n_cells, unsigned seed)
        : hp_(layers()), backend_(cpu_device(), 1), table_(n_cells),
          masks_(
              hp_, [&](int64_t) -> Backend & { return backend_; }, n_cells, MOST_ROWS / 2),
          n_cells_(n_cells), random_(seed) {
        masks_.reserve(MOST_ROWS);
    }

    int below(int n) { return static_cast<int>(random_() % n); }
    int32_t position() const { return position_; }
    int64_t n_free() const { return table_.n_free(); }
    uint64_t bytes_written() const { return masks_.bytes_written(); }

    void append(int64_t n, bool check) {
        const std::vector<int32_t> positions = following(n);
        const std::vector<int64_t> cells = take(positions, SEQUENCE);
        pass({positions, cells, nullptr}, check);
        position_ += n;
    }

    // What a drafter does: its rows are forgotten.
    void block(int64_t n) {
        const std::vector<int32_t> positions = following(n);
        const std::vector<int64_t> cells = take(positions, SEQUENCE);
        pass({positions, cells, nullptr}, true);
        release(cells);
    }

    // A random tree of n nodes and padding, then n_accepted of a path.
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
            positions.push_back(position_ + tree.depth(i));
        }
        std::vector<int64_t> cells = take(positions, OTHERS);
        if (n_padding > 0) {
            positions.resize(n + n_padding, position_);
            cells.resize(n + n_padding, table_.find_free(1).front());
        }
        pass({positions, cells, &tree}, check);
        path.resize(below(path.size() + 1));
        for (size_t i = 0; i < path.size(); ++i) {
            table_.own(cells[moves_rows ? i : path[i]], SEQUENCE, position_++);
        }
        for (int64_t i = 0; i < n; ++i) {
            if (table_.sequence(cells[i]) == OTHERS) {
                table_.release(cells[i]);
            }
        }
    }

    void truncate(int32_t position) {
        table_.release_from(SEQUENCE, position);
        position_ = position;
    }

    void forget_before(int32_t position) { table_.release_before(SEQUENCE, position); }

  private:
    std::vector<int32_t> following(int64_t n) const {
        std::vector<int32_t> positions(n);
        std::iota(positions.begin(), positions.end(), position_);
        return positions;
    }

    std::vector<int64_t> take(const std::vector<int32_t> & positions, int32_t sequence) {
        const std::vector<int64_t> cells = table_.find_free(positions.size());
        for (size_t i = 0; i < cells.size(); ++i) {
            table_.own(cells[i], sequence, positions[i]);
        }
        return cells;
    }

    void release(const std::vector<int64_t> & cells) {
        for (const int64_t cell : cells) {
            table_.release(cell);
        }
    }

    // Over the cells in use where there are few, or all of them; then compares every element.
    void pass(const MaskRows & rows, bool check) {
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
    }

    bool sees(const LayerShape & layer, const MaskRows & rows, int64_t i, int64_t cell) const {
        const int32_t own = rows.positions[i];
        auto reaches = [&](int32_t other) {
            return (layer.window == 0 || std::abs(own - other) < layer.window) &&
                   (!layer.causal || other <= own);
        };
        if (rows.tree != nullptr) {
            const int32_t start = i < rows.tree->size() ? static_cast<int32_t>(i) : 0;
            for (int32_t node = start; node >= 0; node = rows.tree->parent(node)) {
                if (rows.cells[node] == cell) {
                    return reaches(rows.positions[node]);
                }
            }
        }
        return table_.sequence(cell) == SEQUENCE && reaches(table_.position(cell));
    }

    Hparams hp_;
    Backend backend_;
    CellTable table_;
    CellMasks masks_;
    int64_t n_cells_;
    int32_t position_ = 0;
    std::mt19937 random_;
};

void random_passes(unsigned seed) {
    Timeline line(256, seed);
    for (int step = 0; step < 150; ++step) {
        const int64_t n = 1 + line.below(MOST_ROWS);
        if (line.n_free() <= MOST_ROWS + 1) {
            line.truncate(line.below(line.position()));
        }
        switch (line.below(8)) {
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
        default:
            line.round(n, line.below(2) * line.below(MOST_ROWS - n + 1), line.below(2) == 1, true);
        }
    }
}

// More single steps than changes are remembered: rows that missed them are written anew.
void rows_that_rested() {
    Timeline line(16384, 3);
    line.round(MOST_ROWS, 0, true, true);
    for (int step = 0; step < 12000; ++step) {
        line.append(1, false);
    }
    line.round(MOST_ROWS, 0, true, true);
}

uint64_t bytes_a_round(int64_t n_cells) {
    Timeline line(n_cells, 5);
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
    CHECK(after_2048 < 5 * MOST_ROWS * 400 * sizeof(ggml_fp16_t)); // of five masks
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
