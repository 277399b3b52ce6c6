// CellTable against a table without its shortcuts, over random moves of several sequences.
#include "cache/cells.h"
#include "check.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <random>
#include <set>

using namespace dfl;

namespace {

constexpr int64_t N_CELLS = 5 * CellTable::PAGE;
constexpr int32_t N_SEQUENCES = 3;

struct Owner {
    int32_t sequence = CellTable::FREE;
    int32_t position = CellTable::FREE;
};

// The same table, kept the slow way.
using Model = std::vector<Owner>;

void check_same(const CellTable & table, const Model & model) {
    int64_t n_used = 0, high = 0, n_unclaimed = 0;
    for (int64_t page = 0; page < N_CELLS / CellTable::PAGE; ++page) {
        std::set<int32_t> owners;
        for (int64_t i = page * CellTable::PAGE; i < (page + 1) * CellTable::PAGE; ++i) {
            if (model[i].sequence != CellTable::FREE) {
                ++n_used;
                high = i + 1;
                owners.insert(model[i].sequence);
            }
        }
        CHECK(owners.size() <= 1); // pages have one owner
        n_unclaimed += owners.empty() ? CellTable::PAGE : 0;
    }
    CHECK(table.size() == N_CELLS);
    CHECK(table.n_free() == N_CELLS - n_used);
    CHECK(table.n_unclaimed() == n_unclaimed);
    CHECK(table.high() == high);
}

void check_spans(const CellTable & table, const Model & model, int32_t sequence) {
    Model found(N_CELLS);
    int64_t end = 0, last_end = -1;
    for (const cpu::CellSpan & span : table.spans(sequence)) {
        CHECK(span.n > 0 && span.position >= end);
        CHECK(span.position > end || span.cell != last_end || end == 0); // as long as they can be
        end = span.position + span.n;
        last_end = span.cell + span.n;
        for (int64_t i = 0; i < span.n; ++i) {
            found[span.cell + i] = {sequence, static_cast<int32_t>(span.position + i)};
        }
    }
    for (int64_t cell = 0; cell < N_CELLS; ++cell) {
        const bool is_placed = model[cell].sequence == sequence && model[cell].position >= 0;
        CHECK(found[cell].position == (is_placed ? model[cell].position : CellTable::FREE));
    }
}

void check_mask(const CellTable & table, const Model & model, int32_t sequence, int32_t position,
                int64_t window, bool causal) {
    std::vector<ggml_fp16_t> row(N_CELLS);
    table.mask_row(sequence, position, window, causal, 0, N_CELLS, row.data());
    for (int64_t cell = 0; cell < N_CELLS; ++cell) {
        const Owner & owner = model[cell];
        const bool visible = owner.sequence == sequence && owner.position >= 0 &&
                             (!causal || owner.position <= position) &&
                             (window == 0 || std::abs(owner.position - position) < window);
        const float mask = ggml_fp16_to_fp32(row[cell]);
        CHECK(visible ? mask == 0.0f : std::isinf(mask) && mask < 0);
    }
}

void random_moves(unsigned seed) {
    std::mt19937 random(seed);
    auto below = [&](int n) { return static_cast<int>(random() % n); };
    CellTable table(N_CELLS, N_SEQUENCES);
    Model model(N_CELLS);
    int32_t ends[N_SEQUENCES] = {};
    std::vector<int64_t> held[N_SEQUENCES]; // of an open verify
    for (int step = 0; step < 400; ++step) {
        const int32_t sequence = below(N_SEQUENCES);
        int32_t & end = ends[sequence];
        std::vector<int64_t> & open = held[sequence];
        switch (below(6)) {
        case 0:
        case 1: { // an append, or a verify
            const int64_t n = 1 + below(90), wanted = table.wanted(sequence, n);
            if (wanted > table.n_unclaimed()) {
                CHECK(contains(error_of([&] { table.take(sequence, n); }), "rows do not fit"));
                break;
            }
            const int64_t before = table.n_unclaimed();
            const std::vector<int64_t> cells = table.take(sequence, n);
            CHECK(before - table.n_unclaimed() == wanted);
            for (const int64_t cell : cells) {
                CHECK(model[cell].sequence == CellTable::FREE);
                model[cell] = {sequence, CellTable::FREE};
            }
            if (below(2) == 0) {
                for (const int64_t cell : cells) {
                    table.place(cell, end);
                    model[cell].position = end++;
                }
            } else {
                open.insert(open.end(), cells.begin(), cells.end());
            }
            break;
        }
        case 2: { // a commit of some
            for (const int64_t cell : open) {
                if (below(3) == 0) {
                    table.place(cell, end);
                    model[cell].position = end++;
                } else {
                    table.release(cell);
                    model[cell] = {};
                }
            }
            open.clear();
            break;
        }
        case 3:
        case 4: {
            const int32_t position = below(end + 1);
            table.release_from(sequence, position);
            for (Owner & owner : model) {
                if (owner.sequence == sequence && owner.position >= position) {
                    owner = {};
                }
            }
            end = position;
            break;
        }
        case 5: {
            const int32_t position = below(end + 1);
            table.release_before(sequence, position);
            for (Owner & owner : model) {
                if (owner.sequence == sequence && owner.position >= 0 &&
                    owner.position < position) {
                    owner = {};
                }
            }
        }
        }
        check_same(table, model);
        for (int32_t other = 0; other < N_SEQUENCES; ++other) {
            check_spans(table, model, other);
        }
        check_mask(table, model, sequence, below(300), below(2) * below(80), below(2) == 1);
    }
}

// Rows of a sequence that only grows and goes back lie in the order of their positions, page by
// page, although others grow beside it.
void rows_lie_in_order() {
    CellTable table(8 * CellTable::PAGE, 2);
    int32_t ends[2] = {};
    std::mt19937 random(5);
    for (int step = 0; step < 300; ++step) {
        const int32_t sequence = static_cast<int32_t>(random() % 2);
        if (table.n_unclaimed() < 2 * CellTable::PAGE || random() % 8 == 0) {
            ends[sequence] -= static_cast<int32_t>(random() % (ends[sequence] + 1));
            table.release_from(sequence, ends[sequence]);
        } else {
            for (const int64_t cell : table.take(sequence, 1 + random() % 20)) {
                table.place(cell, ends[sequence]++);
            }
        }
        CHECK(table.spans(sequence).size() <=
              static_cast<size_t>(ends[sequence] / CellTable::PAGE + 1));
    }
}

void full_table_says_so() {
    CellTable table(64);
    CHECK(table.take(0, 60).size() == 60);
    CHECK(table.take(0, 0).empty());
    CHECK(contains(error_of([&] { table.take(0, 5); }), "5 rows do not fit: 4 of 64"));
    CHECK(table.n_free() == 4);
}

void touched_are_those_that_were_ever_taken() {
    CellTable table(64);
    table.reserve_last();
    CHECK(table.size() == 63 && table.n_cells() == 64 && table.n_touched() == 0);
    for (const int64_t cell : table.take(0, 9)) {
        table.place(cell, static_cast<int32_t>(cell));
    }
    table.release_from(0, 4);
    CHECK(table.high() == 4 && table.n_touched() == 9);
    CHECK(table.take(0, 59).size() == 59 && table.n_free() == 0);
}

} // namespace

int main() {
    for (unsigned seed = 0; seed < 50; ++seed) {
        random_moves(seed);
    }
    rows_lie_in_order();
    full_table_says_so();
    touched_are_those_that_were_ever_taken();
}
