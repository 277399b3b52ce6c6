// CellTable against a table without its shortcuts, over random moves.
#include "cache/cells.h"
#include "check.h"

#include <cmath>
#include <cstdlib>
#include <random>
#include <set>

using namespace dfl;

namespace {

constexpr int64_t N_CELLS = 64;

struct Owner {
    int32_t sequence = CellTable::FREE;
    int32_t position = CellTable::FREE;
};

// The same table, kept the slow way.
using Model = std::vector<Owner>;

void check_same(const CellTable & table, const Model & model) {
    int64_t n_used = 0, high = 0;
    for (int64_t cell = 0; cell < N_CELLS; ++cell) {
        if (model[cell].sequence != CellTable::FREE) {
            ++n_used;
            high = cell + 1;
        }
    }
    CHECK(table.size() == N_CELLS);
    CHECK(table.n_free() == N_CELLS - n_used);
    CHECK(table.high() == high);
}

void check_mask(const CellTable & table, const Model & model, int32_t sequence, int32_t position,
                int64_t window, bool causal) {
    std::vector<ggml_fp16_t> row(N_CELLS);
    table.mask_row(sequence, position, window, causal, 0, N_CELLS, row.data());
    for (int64_t cell = 0; cell < N_CELLS; ++cell) {
        const Owner & owner = model[cell];
        const bool visible = owner.sequence == sequence &&
                             (!causal || owner.position <= position) &&
                             (window == 0 || std::abs(owner.position - position) < window);
        const float mask = ggml_fp16_to_fp32(row[cell]);
        CHECK(visible ? mask == 0.0f : std::isinf(mask) && mask < 0);
    }
}

void allocate(CellTable & table, Model & model, int64_t n, int32_t sequence, int32_t position) {
    const std::vector<int64_t> cells = table.find_free(n);
    CHECK(static_cast<int64_t>(cells.size()) == n);
    // The n lowest free cells, in order.
    int64_t i = 0;
    for (int64_t cell = 0; cell < N_CELLS && i < n; ++cell) {
        if (model[cell].sequence == CellTable::FREE) {
            CHECK(cells[i++] == cell);
        }
    }
    for (int64_t j = 0; j < n; ++j) {
        model[cells[j]] = {sequence, static_cast<int32_t>(position + j)};
        table.own(cells[j], sequence, position + j);
    }
}

void random_moves(unsigned seed) {
    std::mt19937 random(seed);
    auto below = [&](int n) { return static_cast<int>(random() % n); };
    CellTable table(N_CELLS);
    Model model(N_CELLS);
    for (int step = 0; step < 300; ++step) {
        const int32_t sequence = below(3), position = below(40);
        switch (below(4)) {
        case 0:
        case 1:
            if (const int64_t n = below(9); n <= table.n_free()) {
                allocate(table, model, n, sequence, position);
            }
            break;
        case 2: {
            const int64_t cell = below(N_CELLS);
            table.release(cell);
            model[cell] = {};
            break;
        }
        case 3:
            table.release_from(sequence, position);
            for (Owner & owner : model) {
                if (owner.sequence == sequence && owner.position >= position) {
                    owner = {};
                }
            }
        }
        check_same(table, model);
        check_mask(table, model, sequence, position, below(2) * below(12), below(2) == 1);
    }
}

void full_table_says_so() {
    CellTable table(N_CELLS);
    Model model(N_CELLS);
    allocate(table, model, N_CELLS, 0, 0);
    CHECK(table.find_free(0).empty());
    CHECK(contains(error_of([&] { table.find_free(1); }), "1 rows do not fit: 0 of 64"));
}

void touched_are_those_that_were_ever_found() {
    CellTable table(N_CELLS);
    table.reserve_last();
    CHECK(table.size() == N_CELLS - 1 && table.n_cells() == N_CELLS && table.n_touched() == 0);
    for (const int64_t cell : table.find_free(9)) {
        table.own(cell, 0, static_cast<int32_t>(cell));
    }
    table.release_from(0, 4);
    CHECK(table.high() == 4 && table.n_touched() == 9);
    table.find_free(7); // padding is not owned
    CHECK(table.n_touched() == 11);
}

} // namespace

int main() {
    for (unsigned seed = 0; seed < 50; ++seed) {
        random_moves(seed);
    }
    full_table_says_so();
    touched_are_those_that_were_ever_found();
}
