// K/V groups with a window: cells_needed() is enough for any order of passes, and sequences keep
// the rows of their window.
#include "cache/kv_group.h"
#include "check.h"

#include <algorithm>
#include <random>

using namespace dfl;

namespace {

struct Sizes {
    int64_t window;
    int32_t n_sequences;
    int64_t n_appended, n_verified; // most rows of one pass
    bool is_host;                   // K/V in host memory: a commit moves accepted rows together
};

// Returns cells_needed() rounded down to whole pages. Each pending verify has one padding row.
int64_t cells_of(const Sizes & sizes) {
    const KvGroup::UncommittedRows open = {std::max(sizes.n_appended, sizes.n_verified + 1),
                                           sizes.n_appended + sizes.n_verified + sizes.n_sequences};
    return KvGroup::cells_needed(sizes.window, sizes.n_sequences, open, sizes.is_host) /
           CellTable::PAGE * CellTable::PAGE;
}

Backend & host() {
    static Backend backend(cpu_device(), 1);
    return backend;
}

KvGroup group_of(const Sizes & sizes) {
    const int64_t n_cells = cells_of(sizes);
    const LayerPlace place = [](int64_t) -> Backend & { return host(); };
    return {sizes.window, CellTable(n_cells, sizes.n_sequences, /*packs =*/true),
            CellMasks(Hparams{}, {}, place, n_cells, 1), false};
}

// Sequences that append, verify and commit in the order of an engine. Verifies may stay pending
// over several passes, and commits accept any rows.
class Use {
  public:
    Use(const Sizes & sizes, unsigned seed)
        : sizes_(sizes), group_(group_of(sizes)), random_(seed), ends_(sizes.n_sequences),
          open_(sizes.n_sequences) {}

    int64_t most_claimed() const { return most_claimed_; }

    // Appends chunks and starts verifies, up to the row limits of one pass.
    void pass() {
        int64_t n_rows = 1 + below(sizes_.n_appended), n_nodes = sizes_.n_verified;
        for (const auto & open : open_) {
            n_nodes -= open.empty() ? 0 : static_cast<int64_t>(open.size()) - 1;
        }
        std::vector<int32_t> appended;
        for (int32_t i = 0; i < sizes_.n_sequences; ++i) {
            const int64_t wanted = 1 + below(below(3) == 0 ? sizes_.n_appended : 9);
            if (!open_[i].empty() || below(4) == 0) {
                continue;
            }
            if (below(2) == 0 && n_nodes > 0) {
                const int64_t n = std::min(n_nodes, wanted);
                open_[i] = group_.cells().take(i, n + 1);
                n_nodes -= n;
            } else if (n_rows > 0) {
                const int64_t n = std::min(n_rows, wanted);
                for (const int64_t cell : group_.cells().take(i, n)) {
                    group_.cells().place(cell, ends_[i]++);
                }
                n_rows -= n;
                appended.push_back(i);
            }
        }
        note();
        for (const int32_t i : appended) {
            move_on(i);
        }
    }

    void commit() {
        for (int32_t i = 0; i < sizes_.n_sequences; ++i) {
            std::vector<int64_t> & open = open_[i];
            if (open.empty() || below(3) == 0) {
                continue;
            }
            const bool takes_most = below(2) == 0;
            std::vector<bool> stays(open.size());
            size_t n_staying = 0;
            for (size_t row = 0; row + 1 < open.size(); ++row) {
                stays[row] = below(4) < (takes_most ? 3 : 1);
                n_staying += stays[row];
            }
            for (size_t row = 0; row < open.size(); ++row) {
                if (sizes_.is_host ? row < n_staying : stays[row]) {
                    group_.cells().place(open[row], ends_[i]++);
                }
            }
            for (size_t row = open.size(); row-- > 0;) {
                if (group_.cells().position(open[row]) == CellTable::FREE) {
                    group_.cells().release(open[row]);
                }
            }
            open.clear();
            move_on(i);
        }
    }

    void go_back() {
        const int32_t i = below(sizes_.n_sequences);
        if (open_[i].empty()) {
            const int64_t first = first_position(i);
            const int64_t least = below(8) == 0 || first == 0 ? 0 : first + sizes_.window - 1;
            CHECK(least == 0 || ends_[i] - least >= KvGroup::REACH || shortened_);
            ends_[i] -= below(std::min<int64_t>(ends_[i] - least, 90) + 1);
            ends_[i] = least == 0 && below(2) == 0 ? 0 : ends_[i];
            shortened_ = true;
            group_.cells().release_from(i, ends_[i]);
            if (!has_window(i)) {
                group_.cells().release_from(i, 0);
                ends_[i] = 0;
            }
        }
    }

    int below(int64_t n) { return static_cast<int>(random_() % n); }

  private:
    void note() {
        const CellTable & table = group_.cells();
        most_claimed_ = std::max(most_claimed_, table.size() - table.n_unclaimed());
    }

    int64_t first_position(int32_t i) const {
        const std::vector<cpu::CellSpan> & spans = group_.cells().spans(i);
        return spans.empty() ? 0 : spans.front().position;
    }

    // True if the sequence has all rows that its next row attends to.
    bool has_window(int32_t i) const {
        const int64_t first = std::max<int64_t>(0, ends_[i] - sizes_.window + 1);
        return first >= ends_[i] ||
               (!group_.cells().spans(i).empty() && first_position(i) <= first);
    }

    // Slides the window, then checks the retained rows.
    void move_on(int32_t i) {
        group_.slide_window(i, ends_[i]);
        CHECK(has_window(i));
        int64_t n = 0;
        for (const cpu::CellSpan & span : group_.cells().spans(i)) {
            n += span.n;
        }
        CHECK(n <= sizes_.window - 1 + KvGroup::REACH + CellTable::PAGE - 1);
        CHECK(n <= ends_[i]);
    }

    Sizes sizes_;
    KvGroup group_;
    std::mt19937 random_;
    std::vector<int32_t> ends_;
    std::vector<std::vector<int64_t>> open_;
    int64_t most_claimed_ = 0;
    bool shortened_ = false;
};

// CellTable::take() never throws with cells_needed() cells.
void cells_suffice() {
    for (Sizes sizes :
         {Sizes{1, 1, 5, 9, true}, Sizes{8, 1, 512, 256, true}, Sizes{8, 3, 64, 64, true},
          Sizes{128, 4, 100, 64, true}, Sizes{100, 16, 16, 256, true}}) {
        int64_t most = 0;
        for (unsigned seed = 0; seed < 6; ++seed) {
            sizes.is_host = seed % 2 == 0;
            Use use(sizes, seed);
            for (int step = 0; step < 1500; ++step) {
                use.pass();
                use.commit();
                if (use.below(6) == 0) {
                    use.go_back();
                }
            }
            most = sizes.is_host ? std::max(most, use.most_claimed()) : most;
        }
        sizes.is_host = true;
        CHECK(most >= cells_of(sizes) * 6 / 10);
    }
}

} // namespace

int main() { cells_suffice(); }
