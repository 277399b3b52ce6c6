#include "cache/cell_masks.h"

#include <algorithm>

namespace dfl {

// Number of cell changes that the log keeps. Mask rows older than the log are written anew.
static constexpr size_t MOST_LOGGED = 8192;
// Largest gap, in cells, between changed cells whose mask values go to the device in one copy: two
// copies would cost more than copying the gap.
static constexpr int64_t MAX_GAP = 256;

CellMasks::CellMasks(const Hparams & hp, const std::vector<int64_t> & layers,
                     const LayerPlace & place, int64_t n_cells, int64_t n_rows)
    : n_cells_(n_cells), n_rows_(0), index_(hp.n_layer(), -1) {
    for (const int64_t il : layers) {
        const LayerShape & layer = hp.layers[il];
        const MaskRule rule = {layer.window, layer.causal};
        Backend * backend = &place(il);
        const auto known = std::find_if(masks_.begin(), masks_.end(), [&](const MaskBuffer & mask) {
            return mask.rule == rule && mask.backend == backend;
        });
        index_[il] = known - masks_.begin();
        if (known == masks_.end()) {
            masks_.push_back({rule, backend, nullptr, {}});
        }
    }
    reserve(n_rows);
}

void CellMasks::reserve(int64_t n_rows) {
    if (n_rows <= n_rows_) {
        return;
    }
    std::vector<MaskBuffer> fresh;
    for (const MaskBuffer & mask : masks_) {
        ggml_context_ptr ctx(ggml_init({ggml_tensor_overhead(), nullptr, true}));
        ggml_tensor * tensor = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F16, n_cells_ * n_rows);
        Allocation memory = mask.backend->allocate(ctx.get(), "the buffer of attention masks");
        fresh.push_back({mask.rule, mask.backend, std::move(ctx), std::move(memory), tensor});
    }
    masks_ = std::move(fresh);
    n_rows_ = n_rows;
    n_kv_ = 0;
}

std::vector<ggml_tensor *> CellMasks::views(ggml_context * ctx, int64_t n_kv,
                                            int64_t n_rows) const {
    std::vector<ggml_tensor *> views;
    for (const MaskBuffer & mask : masks_) {
        const size_t row = ggml_row_size(GGML_TYPE_F16, n_kv);
        views.push_back(ggml_view_2d(ctx, mask.tensor, n_kv, n_rows, row, 0));
    }
    return views;
}

void CellMasks::log_changes(const CellTable & table, const std::vector<int64_t> & cells) {
    for (const int64_t cell : cells) {
        if (table.position(cell) == CellTable::FREE) {
            continue;
        }
        const size_t sequence = table.sequence(cell), position = table.position(cell);
        if (sequence >= cell_at_.size()) {
            cell_at_.resize(sequence + 1);
        }
        std::vector<int32_t> & cell_at = cell_at_[sequence];
        if (position >= cell_at.size()) {
            cell_at.resize(2 * position + 1, -1);
        }
        cell_at[position] = static_cast<int32_t>(cell);
    }
    log_.insert(log_.end(), cells.begin(), cells.end());
    if (log_.size() > MOST_LOGGED) {
        const size_t n_dropped = log_.size() - MOST_LOGGED / 2;
        log_.erase(log_.begin(), log_.begin() + n_dropped);
        log_start_ += n_dropped;
    }
}

// Returns the sequence of row i of a pass; padding rows belong to the last sequence.
static const SequenceRows & rows_of(const MaskRows & rows, int64_t i) {
    const auto after =
        std::upper_bound(rows.sequences.begin(), rows.sequences.end(), i,
                         [](int64_t row, const SequenceRows & of) { return row < of.first; });
    return after[-1];
}

// Returns the number of leading mask rows that belong to the same sequence as in the last update
// and whose last write is not older than the log of changed cells.
int64_t CellMasks::n_unchanged_rows(const MaskRows & rows) const {
    int64_t n = 0;
    for (const WrittenRow & row : written_) {
        if (n == static_cast<int64_t>(rows.positions.size()) || row.changes < log_start_ ||
            row.sequence != rows_of(rows, n).sequence) {
            break;
        }
        ++n;
    }
    return n;
}

// Returns the ranges of cells to rewrite in the leading mask rows that are otherwise still valid.
std::vector<CellMasks::Span> CellMasks::changed_spans(const MaskBuffer & mask,
                                                      const MaskRows & rows,
                                                      int64_t n_unchanged) const {
    std::vector<int64_t> cells(log_.begin() + (written_[n_unchanged - 1].changes - log_start_),
                               log_.end());
    if (mask.rule.window > 0) {
        // Cells leave a row's window if its position rises, and enter it if the position falls.
        for (int64_t i = 0; i < n_unchanged; ++i) {
            const auto sequence = static_cast<size_t>(written_[i].sequence);
            if (sequence >= cell_at_.size()) {
                continue;
            }
            const std::vector<int32_t> & cell_at = cell_at_[sequence];
            const auto [low, high] = std::minmax(written_[i].position, rows.positions[i]);
            const int64_t last = std::min<int64_t>(high - mask.rule.window,
                                                   static_cast<int64_t>(cell_at.size()) - 1);
            for (int64_t position = std::max<int64_t>(0, low - mask.rule.window + 1);
                 position <= last; ++position) {
                if (cell_at[position] >= 0) {
                    cells.push_back(cell_at[position]);
                }
            }
        }
    }
    std::sort(cells.begin(), cells.end());
    std::vector<Span> spans;
    for (const int64_t cell : cells) {
        if (cell >= n_kv_) {
            break;
        }
        if (spans.empty() || cell > spans.back().end + MAX_GAP) {
            spans.push_back({cell, cell});
        }
        spans.back().end = cell + 1;
    }
    return spans;
}

void CellMasks::fill(const MaskRule & rule, const CellTable & table, const MaskRows & rows,
                     int64_t i, Span span, ggml_fp16_t * to) const {
    const int32_t position = rows.positions[i];
    const SequenceRows & of = rows_of(rows, i);
    table.mask_row(of.sequence, position, rule.window, rule.causal, span.first,
                   span.end - span.first, to);
    if (of.tree == nullptr) {
        return;
    }
    const ggml_fp16_t visible = ggml_fp32_to_fp16(0.0f);
    int64_t node = i < of.first + of.n ? i - of.first : 0;
    for (; node >= 0; node = of.tree->parent(node)) {
        const int64_t cell = rows.cells[of.first + node];
        const bool is_near =
            rule.window == 0 || position - rows.positions[of.first + node] < rule.window;
        if (is_near && cell >= span.first && cell < span.end) {
            to[cell - span.first] = visible;
        }
    }
}

// Returns memory for n mask values, which keep their values until the next update.
ggml_fp16_t * CellMasks::stage(int64_t n) {
    if (n_staged_ == staged_.size()) {
        staged_.push_back({nullptr, 0});
    }
    Staged & staged = staged_[n_staged_++];
    if (staged.size < n) {
        staged = {nullptr, n + n / 2}; // with room for a few more cells a row
        staged.values.reset(new ggml_fp16_t[staged.size]);
    }
    return staged.values.get();
}

void CellMasks::write(const MaskBuffer & mask, const CellTable & table, const MaskRows & rows,
                      Span span, int64_t first_row, int64_t end_row) {
    const int64_t n = span.end - span.first, n_rows = end_row - first_row;
    if (n == 0 || n_rows == 0) {
        return;
    }
    const bool is_host = mask.backend->is_host();
    ggml_fp16_t * at = nullptr;
    int64_t stride = n;
    if (!is_host) {
        at = stage(n * n_rows);
    } else {
        at = static_cast<ggml_fp16_t *>(mask.tensor->data) + first_row * n_kv_ + span.first;
        stride = n_kv_;
    }
    for (int64_t i = first_row; i < end_row; ++i) {
        fill(mask.rule, table, rows, i, span, at + (i - first_row) * stride);
    }
    if (!is_host) {
        constexpr size_t size = sizeof(ggml_fp16_t);
        ggml_backend_tensor_set_2d_async(mask.backend->get(), mask.tensor, at,
                                         (first_row * n_kv_ + span.first) * size, n * size, n_rows,
                                         n_kv_ * size, n * size);
    }
    bytes_written_ += n * n_rows * sizeof(ggml_fp16_t);
}

void CellMasks::update(CellTable & table, const MaskRows & rows, int64_t n_kv) {
    const auto n_rows = static_cast<int64_t>(rows.positions.size());
    n_staged_ = 0;
    log_changes(table, table.take_changes());
    if (n_kv != n_kv_) {
        written_.clear();
        n_kv_ = n_kv;
    }
    const int64_t n_unchanged = n_unchanged_rows(rows);
    for (const MaskBuffer & mask : masks_) {
        if (n_unchanged > 0) {
            for (const Span & span : changed_spans(mask, rows, n_unchanged)) {
                write(mask, table, rows, span, 0, n_unchanged);
            }
        }
        write(mask, table, rows, {0, n_kv}, n_unchanged, n_rows);
    }
    written_.resize(std::max(written_.size(), rows.positions.size()));
    for (int64_t i = 0; i < n_rows; ++i) {
        written_[i] = {rows_of(rows, i).sequence, rows.positions[i],
                       log_start_ + static_cast<int64_t>(log_.size())};
    }
    // Tree nodes see cells of their own pass by ancestry, not by position, so these mask values are
    // wrong for later passes: the next pass rewrites them.
    log_changes(table, rows.cells);
}

uint64_t CellMasks::bytes(const Backend * on) const {
    uint64_t sum = 0;
    for (const MaskBuffer & mask : masks_) {
        sum += on == nullptr || mask.backend == on ? mask.memory.bytes : 0;
    }
    return sum;
}

} // namespace dfl
