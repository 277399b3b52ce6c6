// Layers with a window: their cells suffice whatever sequences do, what is kept is what may be
// seen, and rows that were saved come back.
#include "cache/kv_group.h"
#include "check.h"

#include <algorithm>
#include <random>

using namespace dfl;

namespace {

struct Sizes {
    int64_t window;
    int32_t n_sequences;
    int64_t n_appended, n_verified; // most rows of passes
    bool is_host;                   // accepted rows are moved together
};

// No more than are asked for. Each open verify has a row of padding.
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

// Sequences that do what an engine's do, in its order: the rows of verifies that wait for their
// commit are held, and of a commit any rows stay, where they lie or moved together.
class Use {
  public:
    Use(const Sizes & sizes, unsigned seed)
        : sizes_(sizes), group_(group_of(sizes)), random_(seed), ends_(sizes.n_sequences),
          open_(sizes.n_sequences) {}

    int64_t most_claimed() const { return most_claimed_; }

    // A pass of as many rows as there may be: chunks of any size, and verifies.
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

    // Somebody goes back a little, or ends.
    void go_back() {
        const int32_t i = below(sizes_.n_sequences);
        if (open_[i].empty()) {
            const int64_t least = below(8) == 0 ? 0 : group_.earliest_rewind(i);
            CHECK(least == 0 || ends_[i] - least >= KvGroup::REACH || shortened_);
            ends_[i] -= below(std::min<int64_t>(ends_[i] - least, 90) + 1);
            ends_[i] = least == 0 && below(2) == 0 ? 0 : ends_[i];
            shortened_ = true;
            group_.cells().release_from(i, ends_[i]);
            if (!group_.has_window_before(i, ends_[i])) { // further than it holds: it ends
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

    // Afterwards it holds what it has to, and no more than it may.
    void move_on(int32_t i) {
        group_.slide_window(i, ends_[i], ends_[i]);
        CHECK(group_.has_window_before(i, ends_[i]));
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

// No take fails: it would throw.
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
        CHECK(most >= cells_of(sizes) * 6 / 10); // not many are there for nothing
    }
}

// Two stores of rows that say whose they are.
struct Rows {
    explicit Rows(const Sizes & sizes) : group(group_of(sizes)) {
        ctx.reset(ggml_init({2 * ggml_tensor_overhead(), nullptr, true}));
        const int64_t n_cells = group.cells().n_cells();
        k = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, 3, n_cells);
        v = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F16, 5, n_cells);
        memory = host().allocate(ctx.get(), "rows");
        group.add_layer(host(), k, v);
    }

    void append(int32_t sequence, int64_t n, int32_t & end) {
        for (const int64_t cell : group.cells().take(sequence, n)) {
            group.cells().place(cell, end);
            for (int64_t i = 0; i < 3; ++i) {
                static_cast<float *>(k->data)[cell * 3 + i] = value(sequence, end, i);
            }
            for (int64_t i = 0; i < 5; ++i) {
                static_cast<ggml_fp16_t *>(v->data)[cell * 5 + i] = half(sequence, end, i);
            }
            ++end;
        }
        group.slide_window(sequence, end, end);
    }

    // What a row at a position sees is that of these positions.
    void check(int32_t sequence, int32_t position) const {
        CHECK(group.has_window_before(sequence, position));
        int64_t n = 0;
        for (const cpu::CellSpan & span : group.cells().spans(sequence)) {
            for (int64_t at = 0; at < span.n; ++at) {
                const int64_t cell = span.cell + at;
                const auto p = static_cast<int32_t>(span.position + at);
                CHECK(static_cast<const float *>(k->data)[cell * 3 + 2] == value(sequence, p, 2));
                CHECK(static_cast<const ggml_fp16_t *>(v->data)[cell * 5 + 4] ==
                      half(sequence, p, 4));
                n += p < position && p > position - group.window();
            }
        }
        CHECK(n == std::min<int64_t>(position, group.window() - 1));
    }

    static float value(int32_t sequence, int32_t position, int64_t i) {
        return static_cast<float>(1000 * position + 10 * i + sequence);
    }
    static ggml_fp16_t half(int32_t sequence, int32_t position, int64_t i) {
        return static_cast<ggml_fp16_t>(7 * position + 3 * i + sequence);
    }

    ggml_context_ptr ctx;
    ggml_tensor *k, *v;
    Allocation memory;
    KvGroup group;
};

void saved_rows_come_back() {
    for (const int64_t window : {1, 2, 8, 64, 65, 100}) {
        for (const int64_t before : {1, 7, 63, 64, 65, 130, 300}) {
            Rows rows({window, 2, 80, 8, true});
            int32_t end = 0, other = 0;
            for (int64_t left = before; left > 0; left -= 50) {
                rows.append(0, std::min<int64_t>(left, 50), end);
                rows.append(1, 30, other);
            }
            std::vector<uint8_t> saved = {42}; // behind what others saved
            rows.group.save(0, end, saved);
            const size_t most = window - 1 + CellTable::PAGE - 1; // from the beginning of a page on
            CHECK(saved.size() - 1 <= most * (rows.k->nb[1] + rows.v->nb[1]));
            const int32_t position = end;
            for (int step = 0; step < 7; ++step) {
                rows.append(0, 45, end);
                rows.append(1, 40, other);
            }
            CHECK(rows.group.has_window_before(0, position) == (window == 1));
            const uint8_t * read = rows.group.load(0, position, saved.data() + 1);
            CHECK(read == saved.data() + saved.size());
            rows.check(0, position);
            rows.check(1, other);
            end = position;
            for (int step = 0; step < 5; ++step) {
                rows.append(0, 1 + 13 * step, end);
                rows.check(0, end);
            }
        }
    }
}

} // namespace

int main() {
    cells_suffice();
    saved_rows_come_back();
}
