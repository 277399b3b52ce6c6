#include "draft/draft_model.h"

namespace dfl {

// Returns the cells of a drafter's K/V: the windows of all sequences, at most n_ctx together (see
// make_room()), one pass or block, partly filled pages, and a page whose last cell takes padding.
static int64_t cells_needed(const DraftSizes & sizes, int64_t max_block) {
    const int64_t uncommitted = std::max(sizes.n_ubatch, max_block) + CellTable::PAGE;
    const int64_t windows = sizes.n_parallel * sizes.window;
    const int64_t more = (sizes.n_parallel - 1) * (max_block + 2 * CellTable::PAGE);
    return GGML_PAD(std::min(windows, sizes.n_ctx) + uncommitted + more + CellTable::PAGE, 256);
}

static LayerPlace on(Backend & backend) {
    return [&](int64_t) -> Backend & { return backend; };
}

DraftModel::DraftModel(std::shared_ptr<const Drafter> drafter, const DraftHost & host)
    : drafter_(std::move(drafter)), host_(host), backend_(host.devices.main()),
      sizes_(host.devices, host.sizes.n_parallel),
      kv_(drafter_->hparams(), on(drafter_->is_on_cpu() ? *host.devices.cpu() : backend_),
          host.sizes.cache_type, host.sizes.cache_type,
          {cells_needed(host.sizes, drafter_->max_block()), sizes_.draft_rows(host.sizes.n_verify),
           static_cast<int32_t>(host.sizes.n_parallel)}),
      embedding_scale_(drafter_->hparams().embedding_scale),
      no_recurrent_(drafter_->hparams(), on(backend_), 1) {
    kv_.cells().reserve_last();
}

void DraftModel::reserve_rows(int64_t n_rows) {
    kv_.reserve_masks(sizes_.draft_rows(n_rows));
    host_.sizes.n_verify = n_rows;
}

void DraftModel::add_pending(const std::vector<Feature> & features) {
    pending_.insert(pending_.end(), features.begin(), features.end());
}

int64_t DraftModel::n_pending(int32_t sequence) const {
    return std::count_if(pending_.begin(), pending_.end(),
                         [&](const Feature & one) { return one.sequence == sequence; });
}

GraphContext DraftModel::graph_context(CachedGraph & cached) const {
    return {cached.ctx.get(),    cached.graph,        cached.cpu_nodes,
            drafter_->hparams(), drafter_->weights(), kv_,
            no_recurrent_,       cached.shape,        cached.in};
}

void DraftModel::select_top(BatchShape & shape, int64_t k) const {
    const int64_t n_choices = drafter_->head(host_.target).n_out(), n = std::min(k, n_choices);
    shape.n_top = can_select_on_device(backend_, n_choices, n) ? n : 0;
    shape.top_by_blocks = selects_by_blocks(backend_);
}

void DraftModel::slide_window(int32_t sequence, int32_t position) {
    const auto oldest = static_cast<int32_t>(std::max<int64_t>(0, position - window()));
    kv_.groups().front().release_before(sequence, oldest);
    drop_pending([&](const Feature & feature) {
        return feature.sequence == sequence && feature.position < oldest;
    });
}

void DraftModel::make_room(const std::map<int32_t, int64_t> & n_rows) {
    KvGroup & group = kv_.groups().front();
    const auto is_short = [&] {
        int64_t n = group.cells().n_unclaimed();
        for (const auto & [sequence, rows] : n_rows) {
            n -= group.cells().cells_needed(sequence, rows);
        }
        return n < 0;
    };
    while (is_short()) {
        int32_t longest = -1;
        int64_t max_cells = 0;
        for (int32_t sequence = 0; sequence < kv_.n_sequences(); ++sequence) {
            int64_t n = 0;
            for (const cpu::CellSpan & span : group.cells().spans(sequence)) {
                n += span.n;
            }
            if (n > max_cells) {
                max_cells = n;
                longest = sequence;
            }
        }
        if (longest < 0) {
            return; // nothing is left to drop: CellTable::take() will throw
        }
        const auto first = static_cast<int32_t>(group.cells().spans(longest).front().position);
        group.release_before(longest, first + static_cast<int32_t>(CellTable::PAGE));
    }
}

std::vector<int64_t> DraftModel::take_cells(const std::vector<Feature> & features) {
    std::map<int32_t, int64_t> n_rows;
    for (const Feature & feature : features) {
        ++n_rows[feature.sequence];
    }
    make_room(n_rows);
    std::vector<int64_t> cells;
    try {
        for (const Feature & feature : features) {
            cells.push_back(kv_.cells().take(feature.sequence, 1).front());
            kv_.cells().place(cells.back(), feature.position);
        }
    } catch (...) {
        release(cells);
        throw;
    }
    return cells;
}

std::vector<int64_t> DraftModel::take_cells(const std::vector<DraftBlock> & blocks) {
    std::vector<Feature> rows;
    for (const DraftBlock & block : blocks) {
        for (int64_t i = 0; i <= block.n_draft; ++i) {
            rows.push_back({block.sequence, -1, block.position + static_cast<int32_t>(i), -1});
        }
    }
    return take_cells(rows);
}

void DraftModel::release(const std::vector<int64_t> & cells) {
    for (size_t i = cells.size(); i-- > 0;) {
        kv_.cells().release(cells[i]);
    }
}

void DraftModel::clear(int32_t sequence) {
    truncate(sequence, 0);
    kv_.clear(sequence);
}

void DraftModel::truncate(int32_t sequence, int32_t position) {
    kv_.groups().front().release_from(sequence, position);
    drop_pending([&](const Feature & feature) {
        return feature.sequence == sequence && feature.position >= position;
    });
}

} // namespace dfl
