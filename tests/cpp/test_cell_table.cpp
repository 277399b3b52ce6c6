// CellTable compared with a plain list of cell owners, over random operations.
#include "cache/cell_table.h"
#include "check.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
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

using Model = std::vector<Owner>;

void check_same(const CellTable & table, const Model & model) {
    int64_t high = 0, n_unclaimed = 0;
    for (int64_t page = 0; page < N_CELLS / CellTable::PAGE; ++page) {
        std::set<int32_t> owners;
        for (int64_t i = page * CellTable::PAGE; i < (page + 1) * CellTable::PAGE; ++i) {
            if (model[i].sequence != CellTable::FREE) {
                high = i + 1;
                owners.insert(model[i].sequence);
            }
        }
        CHECK(owners.size() <= 1);
        n_unclaimed += owners.empty() ? CellTable::PAGE : 0;
    }
    CHECK(table.size() == N_CELLS);
    CHECK(table.n_unclaimed() == n_unclaimed);
    CHECK(table.high() == high);
}

void check_spans(const CellTable & table, const Model & model, int32_t sequence) {
    Model found(N_CELLS);
    int64_t end = 0, last_end = -1;
    for (const cpu::CellSpan & span : table.spans(sequence)) {
        CHECK(span.n > 0 && span.position >= end);
        CHECK(span.position > end || span.cell != last_end || end == 0);
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
    std::vector<int64_t> held[N_SEQUENCES]; // cells of each pending verify
    for (int step = 0; step < 400; ++step) {
        const int32_t sequence = below(N_SEQUENCES);
        int32_t & end = ends[sequence];
        std::vector<int64_t> & open = held[sequence];
        switch (below(6)) {
        case 0:
        case 1: {
            const int64_t n = 1 + below(90), wanted = table.cells_needed(sequence, n);
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
        case 2: {
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

// Rows of a sequence stay in the order of positions within its pages, even beside a growing
// sequence.
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
    CHECK(contains(error_of([&] { table.take(0, 5); }),
                   "5 rows do not fit into the K/V cache: 4 of 64"));
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
    CHECK(table.take(0, 59).size() == 59);
    CHECK(contains(error_of([&] { table.take(0, 1); }), "0 of 63 cells are free"));
}

// Sequences that share pages with each other and with cached prefixes. Every owner must still find
// its rows after others release theirs, and no cell may stay claimed at the end.
class Sharing {
  public:
    explicit Sharing(unsigned seed) : random_(seed), memory_(N_SHARED_CELLS, 0) {}

    void run() {
        for (int step = 0; step < 600; ++step) {
            const int32_t sequence = below(N_SEQUENCES);
            switch (below(7)) {
            case 0:
            case 1:
                append(sequence, 1 + below(150));
                break;
            case 2:
                verify(sequence);
                break;
            case 3:
                forget(sequence, below(static_cast<int>(rows_[sequence].size()) + 1));
                break;
            case 4:
                keep(sequence);
                break;
            case 5:
                begin(sequence);
                break;
            case 6:
                drop(below(4));
            }
            check();
        }
        CHECK(n_begun_ > 10 && n_copied_ > 10);
        for (int32_t sequence = 0; sequence < N_SEQUENCES; ++sequence) {
            forget(sequence, 0);
        }
        while (!kept_.empty()) {
            drop(0);
        }
        check();
        CHECK(table_.n_unclaimed() == N_SHARED_CELLS);
        CHECK(table_.high() == 0);
    }

    int n_taken_back() const { return n_taken_back_; }

  private:
    static constexpr int64_t N_SHARED_CELLS = 16 * CellTable::PAGE;

    struct Kept {
        std::vector<int64_t> pages;
        std::vector<int> rows;
    };

    int below(int n) { return static_cast<int>(random_() % n); }

    void append(int32_t sequence, int64_t n) {
        if (table_.cells_needed(sequence, n) > table_.n_unclaimed()) {
            return;
        }
        for (const int64_t cell : table_.take(sequence, n)) {
            write(sequence, cell);
        }
    }

    void write(int32_t sequence, int64_t cell) {
        CHECK(table_.sequence(cell) == sequence);
        table_.place(cell, static_cast<int32_t>(rows_[sequence].size()));
        memory_[cell] = ++n_written_;
        rows_[sequence].push_back(n_written_);
    }

    void verify(int32_t sequence) {
        const int64_t n = 1 + below(20);
        if (table_.cells_needed(sequence, n) > table_.n_unclaimed()) {
            return;
        }
        const std::vector<int64_t> cells = table_.take(sequence, n);
        const int64_t n_taken = below(static_cast<int>(n) + 1);
        for (int64_t i = 0; i < n_taken; ++i) {
            write(sequence, cells[i]);
        }
        for (int64_t i = n; i-- > n_taken;) {
            table_.release(cells[i]);
        }
    }

    void forget(int32_t sequence, int32_t position) {
        if (!table_.can_release_from(sequence, position)) {
            const int64_t before = table_.n_unclaimed();
            CHECK(contains(error_of([&] { table_.release_from(sequence, position); }),
                           "takes a page of K/V cells, and none of 16 is free"));
            CHECK(table_.n_unclaimed() == before);
            return;
        }
        const auto n_shared = static_cast<int64_t>(table_.shared(sequence).size());
        const CellTable::Copy copy = table_.release_from(sequence, position);
        std::copy_n(memory_.begin() + copy.from, copy.n, memory_.begin() + copy.to);
        n_copied_ += copy.n > 0;
        n_taken_back_ +=
            copy.n == 0 && position % CellTable::PAGE > 0 && position < n_shared * CellTable::PAGE;
        rows_[sequence].resize(position);
    }

    void keep(int32_t sequence) {
        const auto n = static_cast<int64_t>(rows_[sequence].size()) / CellTable::PAGE;
        table_.share(sequence, n);
        Kept kept = {table_.shared(sequence), rows_[sequence]};
        kept.rows.resize(n * CellTable::PAGE);
        for (const int64_t page : kept.pages) {
            table_.hold(page);
        }
        if (below(3) == 0 && table_.n_unclaimed() > 0 && n > 0) {
            const int64_t page = table_.take_page(0);
            std::copy_n(memory_.begin() + kept.pages[0] * CellTable::PAGE, CellTable::PAGE,
                        memory_.begin() + page * CellTable::PAGE);
            table_.drop(kept.pages[0]);
            kept.pages[0] = page;
        }
        kept_.push_back(kept);
    }

    void begin(int32_t sequence) {
        forget(sequence, 0);
        if (kept_.empty()) {
            return;
        }
        const Kept & kept = kept_[below(static_cast<int>(kept_.size()))];
        const int n = below(static_cast<int>(kept.pages.size()) + 1);
        table_.attach_pages(sequence, {kept.pages.begin(), kept.pages.begin() + n});
        rows_[sequence] = {kept.rows.begin(), kept.rows.begin() + n * CellTable::PAGE};
        n_begun_ += n > 0;
    }

    void drop(int index) {
        if (index < static_cast<int>(kept_.size())) {
            for (const int64_t page : kept_[index].pages) {
                table_.drop(page);
            }
            kept_.erase(kept_.begin() + index);
        }
    }

    void check() const {
        std::map<int64_t, int32_t> holders;
        std::set<int64_t> held;
        for (const Kept & kept : kept_) {
            for (size_t i = 0; i < kept.rows.size(); ++i) {
                const int64_t page = kept.pages[i / CellTable::PAGE];
                holders[page] += i % CellTable::PAGE == 0;
                held.insert(page * CellTable::PAGE + i % CellTable::PAGE);
                CHECK(memory_[page * CellTable::PAGE + i % CellTable::PAGE] == kept.rows[i]);
            }
        }
        for (int32_t sequence = 0; sequence < N_SEQUENCES; ++sequence) {
            for (const int64_t page : table_.shared(sequence)) {
                ++holders[page];
            }
            size_t n = 0;
            for (const cpu::CellSpan & span : table_.spans(sequence)) {
                CHECK(span.position == static_cast<int64_t>(n));
                for (int64_t i = 0; i < span.n; ++i, ++n) {
                    CHECK(memory_[span.cell + i] == rows_[sequence][n]);
                    held.insert(span.cell + i);
                }
            }
            CHECK(n == rows_[sequence].size());
        }
        for (const auto & [page, n] : holders) {
            CHECK(table_.n_holders(page) == n);
            CHECK(table_.sequence(page * CellTable::PAGE) == CellTable::SHARED);
        }
        std::set<int64_t> pages;
        for (const int64_t cell : held) {
            pages.insert(cell / CellTable::PAGE);
        }
        CHECK(table_.n_unclaimed() ==
              N_SHARED_CELLS - static_cast<int64_t>(pages.size()) * CellTable::PAGE);
        CHECK(table_.high() == (held.empty() ? 0 : *held.rbegin() + 1));
    }

    std::mt19937 random_;
    CellTable table_{N_SHARED_CELLS, N_SEQUENCES};
    std::vector<int> memory_;            // last value written to each cell
    std::vector<int> rows_[N_SEQUENCES]; // values written by each sequence, by position
    std::vector<Kept> kept_;
    int n_written_ = 0, n_begun_ = 0, n_copied_ = 0, n_taken_back_ = 0;
};

} // namespace

int main() {
    int n_taken_back = 0;
    for (unsigned seed = 0; seed < 30; ++seed) {
        Sharing sharing(seed);
        sharing.run();
        n_taken_back += sharing.n_taken_back();
    }
    CHECK(n_taken_back > 30);
    for (unsigned seed = 0; seed < 50; ++seed) {
        random_moves(seed);
    }
    rows_lie_in_order();
    full_table_says_so();
    touched_are_those_that_were_ever_taken();
}
