#include "draft/draft_state.h"

#include "error.h"
#include "layers/cpu_ops/row_copies.h"

#include <algorithm>
#include <iterator>
#include <map>

namespace dfl {

// The window of each sequence, but all together no more than the context has tokens, see
// make_room(); one pass or block beside it, pages that are not full, and one cell that padding
// writes to.
static int64_t cells_needed(const DraftSizes & sizes) {
    const int64_t uncommitted = std::max(sizes.n_ubatch, sizes.max_block) + CellTable::PAGE;
    const int64_t windows = sizes.n_parallel * sizes.window;
    const int64_t more = (sizes.n_parallel - 1) * (sizes.max_block + 2 * CellTable::PAGE);
    return GGML_PAD(std::min(windows, sizes.n_ctx) + uncommitted + more + 1, 256);
}

static LayerPlace on(Backend & backend) {
    return [&](int64_t) -> Backend & { return backend; };
}

DraftState::DraftState(std::shared_ptr<const Drafter> drafter, const Model & target,
                       Devices & devices, const DraftSizes & sizes)
    : drafter_(std::move(drafter)), target_(target), backend_(devices.main()),
      sizes_(devices, sizes.n_parallel), draft_sizes_(sizes),
      kv_(drafter_->hparams(), on(backend_), sizes.cache_type, sizes.cache_type,
          {cells_needed(sizes), sizes_.draft_rows(std::max(sizes.max_block, sizes.n_verify)),
           static_cast<int32_t>(sizes.n_parallel)}),
      no_recurrent_(drafter_->hparams(), on(backend_), 1), padding_cell_(kv_.cells().size() - 1) {
    kv_.cells().reserve_last();
    allocate_features(sizes.n_verify);
}

void DraftState::allocate_features(int64_t n_verify) {
    const int64_t n_prefill = std::max(draft_sizes_.n_ubatch, draft_sizes_.n_parallel);
    const int64_t ring = MAX_PENDING + 4 * (draft_sizes_.n_parallel - 1) + n_verify;
    ggml_context_ptr ctx(ggml_init({ggml_tensor_overhead(), nullptr, true}));
    ggml_tensor * features =
        ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, drafter_->draft().n_features(),
                           ring + n_prefill + 1); // the last is padding_row()
    Allocation memory = backend_.allocate(ctx.get(), "the drafter's features");
    ctx_ = std::move(ctx);
    memory_ = std::move(memory);
    features_ = features;
    ring_ = ring;
}

void DraftState::reserve_verify(int64_t n_verify, GraphPool & graphs) {
    flush(graphs); // what waits lies in the old rows
    kv_.reserve_masks(sizes_.draft_rows(std::max(draft_sizes_.max_block, n_verify)));
    allocate_features(n_verify);
    draft_sizes_.n_verify = n_verify;
}

void DraftState::add_taps(CachedGraph & cached, GraphContext & g) {
    cached.draft.feature_rows =
        make_input(cached.ctx.get(), GGML_TYPE_I64, cached.shape.n_rows, 1, "feature_rows");
    ggml_tensor * rows = cached.draft.feature_rows;
    g.tap = [this, rows, &g](int il, ggml_tensor * x) {
        const auto & layers = drafter_->draft().target_layers;
        for (size_t i = 0; i < layers.size(); ++i) {
            if (layers[i] == il) {
                ggml_tensor * part = ggml_view_2d(g.ctx, features_, x->ne[0], features_->ne[1],
                                                  features_->nb[1], i * x->ne[0] * sizeof(float));
                scatter_rows(g, part, x, rows);
            }
        }
    };
}

GraphContext DraftState::make_build(CachedGraph & cached) const {
    return {cached.ctx.get(),    cached.graph,        cached.cpu_nodes,
            drafter_->hparams(), drafter_->weights(), kv_,
            no_recurrent_,       cached.shape,        cached.in};
}

void DraftState::make_injection_inputs(CachedGraph & cached) const {
    const int64_t n = cached.shape.n_inject;
    const int64_t ids = drafter_->hparams().layers[0].rope.n_position_ids();
    ggml_context * ctx = cached.ctx.get();
    cached.draft.inject_positions = make_input(ctx, GGML_TYPE_I32, ids * n, 1, "inject_positions");
    cached.draft.inject_cells = make_input(ctx, GGML_TYPE_I64, n, 1, "inject_cells");
}

static void add_picked_injection(CachedGraph & cached, GraphContext & g, ggml_tensor * features) {
    cached.draft.inject_rows =
        make_input(cached.ctx.get(), GGML_TYPE_I32, cached.shape.n_inject, 1, "inject_rows");
    build_injection(g, gather_rows(g, features, cached.draft.inject_rows),
                    cached.draft.inject_positions, cached.draft.inject_cells);
}

void DraftState::add_prefill_injection(CachedGraph & cached) {
    make_injection_inputs(cached);
    GraphContext g = make_build(cached);
    ggml_tensor * features = ggml_view_2d(g.ctx, features_, features_->ne[0], cached.shape.n_inject,
                                          features_->nb[1], ring_ * features_->nb[1]);
    build_injection(g, features, cached.draft.inject_positions, cached.draft.inject_cells);
}

std::vector<bool> DraftState::pending_rows() const {
    std::vector<bool> rows(ring_, false);
    for (const Pending & one : pending_) {
        rows[one.row] = true;
    }
    return rows;
}

void DraftState::add_pending(int32_t sequence, const std::vector<int64_t> & rows,
                             int32_t position) {
    for (const int64_t row : rows) {
        pending_.push_back({sequence, row, position++});
    }
}

template <typename Is>
void DraftState::drop_pending(Is && is) {
    pending_.erase(std::remove_if(pending_.begin(), pending_.end(), is), pending_.end());
}

void DraftState::slide_window(int32_t sequence, int32_t position) {
    const auto oldest = static_cast<int32_t>(std::max<int64_t>(0, position - draft_sizes_.window));
    kv_.groups().front().release_before(sequence, oldest);
    drop_pending([&](const Pending & feature) {
        return feature.sequence == sequence && feature.position < oldest;
    });
}

void DraftState::make_room(const std::map<int32_t, int64_t> & n_rows) {
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
        for (int32_t sequence = 0; sequence < draft_sizes_.n_parallel; ++sequence) {
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
            return; // who takes them will say so
        }
        const auto first = static_cast<int32_t>(group.cells().spans(longest).front().position);
        group.release_before(longest, first + static_cast<int32_t>(CellTable::PAGE));
    }
}

std::vector<int64_t> DraftState::take_cells(const std::vector<Pending> & features) {
    std::map<int32_t, int64_t> n_rows;
    for (const Pending & feature : features) {
        ++n_rows[feature.sequence];
    }
    make_room(n_rows);
    std::vector<int64_t> cells;
    try {
        for (const Pending & feature : features) {
            cells.push_back(kv_.cells().take(feature.sequence, 1).front());
            kv_.cells().place(cells.back(), feature.position);
        }
    } catch (...) {
        release(cells);
        throw;
    }
    return cells;
}

void DraftState::set_prefill_injection(CachedGraph & cached,
                                       const std::vector<InjectedRows> & injected) {
    std::vector<Pending> features;
    std::vector<int32_t> positions;
    for (const InjectedRows & rows : injected) {
        slide_window(rows.sequence, rows.position);
        for (int64_t i = 0; i < rows.n; ++i) {
            const auto row = ring_ + static_cast<int64_t>(features.size());
            features.push_back({rows.sequence, row, rows.position + static_cast<int32_t>(i)});
            positions.push_back(features.back().position);
        }
    }
    std::vector<int64_t> cells = take_cells(features);
    // Padding is what earlier prompts left, and is written where nobody looks.
    positions.resize(cached.shape.n_inject);
    cells.resize(cached.shape.n_inject, padding_cell_);
    cached.write_positions(cached.draft.inject_positions, positions);
    cached.write<int64_t>(cached.draft.inject_cells,
                          [&](int64_t * data) { std::copy(cells.begin(), cells.end(), data); });
}

void DraftState::set_injection(CachedGraph & cached, const std::vector<Pending> & features,
                               const std::vector<int64_t> & cells) {
    const int64_t n = cached.shape.n_inject;
    const int64_t used = features.size();
    // Padding repeats a real row, if there is one, and writes where nobody looks.
    const auto source = [&](int64_t i) {
        return used == 0 ? Pending{0, ring_, 0} : features[i < used ? i : 0];
    };
    std::vector<int32_t> positions(n);
    for (int64_t i = 0; i < n; ++i) {
        positions[i] = source(i).position;
    }
    cached.write_positions(cached.draft.inject_positions, positions);
    cached.write<int32_t>(cached.draft.inject_rows, [&](int32_t * data) {
        for (int64_t i = 0; i < n; ++i) {
            data[i] = static_cast<int32_t>(source(i).row);
        }
    });
    cached.write<int64_t>(cached.draft.inject_cells, [&](int64_t * data) {
        for (int64_t i = 0; i < n; ++i) {
            data[i] = i < used ? cells[i] : padding_cell_;
        }
    });
}

void DraftState::flush(GraphPool & graphs) {
    std::map<int32_t, int32_t> ends; // of each sequence's features
    for (const Pending & feature : pending_) {
        ends[feature.sequence] = feature.position + 1;
    }
    for (const auto & [sequence, end] : ends) {
        slide_window(sequence, end);
    }
    if (pending_.empty()) {
        return;
    }
    BatchShape shape;
    shape.kind = GraphKind::INJECT;
    shape.n_inject = sizes_.inject_rows(pending_.size());
    CachedGraph & cached = graphs.get(shape, [&](CachedGraph & fresh) {
        make_injection_inputs(fresh);
        GraphContext g = make_build(fresh);
        add_picked_injection(fresh, g, features_);
    });
    const std::vector<int64_t> cells = take_cells(pending_);
    try {
        set_injection(cached, pending_, cells);
        graphs.compute(cached);
    } catch (...) {
        release(cells);
        throw;
    }
    drop_pending([](const Pending &) { return true; });
}

void DraftState::build_draft(CachedGraph & cached) const {
    cached.in = make_inputs(cached.ctx.get(), drafter_->hparams(), kv_, cached.shape);
    if (cached.shape.n_inject > 0) {
        make_injection_inputs(cached);
    }
    GraphContext g = make_build(cached);
    if (cached.shape.n_inject > 0) {
        add_picked_injection(cached, g, features_);
    }
    add_draft_output(cached, build_block(g, drafter_->head(target_)));
}

void DraftState::reserve(GraphPool & graphs) {
    BatchShape largest;
    largest.kind = GraphKind::DRAFT;
    largest.n_rows = sizes_.draft_rows(max_rows());
    largest.n_kv = {kv_.cells().n_cells()};
    largest.n_out = largest.n_rows - 1;
    largest.n_inject = sizes_.inject_rows(ring_);
    largest.log_sum_exp = true;
    const int64_t n_choices = drafter_->head(target_).n_out();
    const int64_t n_top = std::min<int64_t>(n_choices, DFL_MAX_TOP);
    largest.n_top = can_select_on_device(backend_, n_choices, n_top) ? n_top : 0;
    largest.top_by_blocks = selects_by_blocks(backend_);
    graphs.get(largest, [&](CachedGraph & fresh) { build_draft(fresh); });
}

void DraftState::set_block_inputs(CachedGraph & cached, const std::vector<DraftBlock> & blocks,
                                  const std::vector<int64_t> & cells) {
    std::vector<int32_t> tokens, positions, drafted;
    std::vector<SequenceRows> sequences;
    std::vector<int64_t> to = cells;
    for (const DraftBlock & block : blocks) {
        const auto first = static_cast<int64_t>(tokens.size()), n = block.n_draft + 1;
        sequences.push_back({block.sequence, first, n, nullptr});
        tokens.push_back(block.last_token);
        tokens.resize(first + n, drafter_->draft().mask_token);
        for (int64_t i = 0; i < n; ++i) {
            positions.push_back(block.position + static_cast<int32_t>(i));
            if (i > 0) { // what follows the last token is read from the masks
                drafted.push_back(static_cast<int32_t>(first + i));
            }
        }
    }
    // Padding is copies of the last block's first row, and writes what that one writes; nobody
    // reads what it drafts.
    const int64_t last = sequences.back().first;
    tokens.resize(cached.shape.n_rows, tokens[last]);
    positions.resize(cached.shape.n_rows, positions[last]);
    to.resize(cached.shape.n_rows, to[last]);
    drafted.resize(cached.shape.n_out, static_cast<int32_t>(last));
    cached.write<float>(cached.in.embd, [&](float * data) {
        drafter_->embed(target_, tokens.data(), static_cast<int64_t>(tokens.size()), data);
    });
    cached.write_positions(cached.in.positions, positions);
    cached.write<int64_t>(cached.in.cells.front(),
                          [&](int64_t * data) { std::copy(to.begin(), to.end(), data); });
    cached.write<int32_t>(cached.in.out_rows,
                          [&](int32_t * data) { std::copy(drafted.begin(), drafted.end(), data); });
    kv_.groups().front().set_rows({positions, to, sequences}, cached.shape.n_kv.front());
}

std::vector<DraftState::Pending>
DraftState::pending_of(const std::vector<DraftBlock> & blocks) const {
    std::vector<Pending> features;
    for (const DraftBlock & block : blocks) {
        std::copy_if(pending_.begin(), pending_.end(), std::back_inserter(features),
                     [&](const Pending & one) { return one.sequence == block.sequence; });
    }
    return features;
}

// What was read of all blocks, block by block.
static std::vector<Draft> split_draft(const Draft & all, const std::vector<DraftBlock> & blocks,
                                      int64_t k) {
    std::vector<Draft> drafts;
    int64_t row = 0;
    for (const DraftBlock & block : blocks) {
        Draft draft;
        const int64_t end = row + block.n_draft;
        draft.best.assign(all.best.begin() + row * k, all.best.begin() + end * k);
        if (!all.log_sum_exp.empty()) {
            draft.log_sum_exp.assign(all.log_sum_exp.begin() + row, all.log_sum_exp.begin() + end);
        }
        drafts.push_back(std::move(draft));
        row = end;
    }
    return drafts;
}

std::vector<Draft> DraftState::run_blocks(GraphPool & graphs,
                                          const std::vector<DraftBlock> & blocks, int64_t k,
                                          bool log_sum_exp) {
    CellTable & table = kv_.cells();
    BatchShape shape;
    shape.kind = GraphKind::DRAFT;
    for (const DraftBlock & block : blocks) {
        slide_window(block.sequence, block.position);
        shape.n_rows += block.n_draft + 1;
        shape.n_out += block.n_draft;
    }
    shape.n_rows = sizes_.draft_rows(shape.n_rows);
    if (sizes_.serves_many()) {
        shape.n_out = shape.n_rows - 1;
    } else if (const int64_t n = sizes_.draft_rows(shape.n_out); n > shape.n_out) {
        shape.n_out = std::min(n, shape.n_rows - 1);
    }
    const std::vector<Pending> features = pending_of(blocks);
    const std::vector<int64_t> injected_cells = take_cells(features);
    std::vector<int64_t> cells;
    std::map<int32_t, int64_t> n_rows;
    for (const DraftBlock & block : blocks) {
        n_rows[block.sequence] = block.n_draft + 1;
    }
    try {
        make_room(n_rows);
        for (const DraftBlock & block : blocks) {
            const std::vector<int64_t> block_cells = table.take(block.sequence, block.n_draft + 1);
            cells.insert(cells.end(), block_cells.begin(), block_cells.end());
            for (size_t i = 0; i < block_cells.size(); ++i) {
                table.place(block_cells[i], block.position + static_cast<int32_t>(i));
            }
        }
        // The cell that padding writes to is read too: CUDA's flash attention is at its best over
        // multiples of 256 cells.
        const bool has_masks = !kv_.groups().front().masks().empty();
        shape.n_kv = {sizes_.cells(table.high(), table.n_cells(), has_masks, recent_cells_)};
        shape.n_inject = sizes_.inject_rows(features.size());
        const int64_t n_choices = drafter_->head(target_).n_out();
        shape.n_top = can_select_on_device(backend_, n_choices, k) ? k : 0;
        shape.top_by_blocks = selects_by_blocks(backend_);
        shape.log_sum_exp = log_sum_exp;
        CachedGraph & cached = graphs.get(shape, [&](CachedGraph & fresh) { build_draft(fresh); });
        if (shape.n_inject > 0) {
            set_injection(cached, features, injected_cells);
        }
        set_block_inputs(cached, blocks, cells);
        graphs.compute(cached);
        drop_pending([&](const Pending & one) {
            return std::any_of(blocks.begin(), blocks.end(), [&](const DraftBlock & block) {
                return block.sequence == one.sequence;
            });
        });
        release(cells); // the blocks' K/V are temporary: the target's features replace them
        return split_draft(read_draft(cached, k, backend_), blocks, k);
    } catch (...) {
        release(cells);
        release(injected_cells);
        throw;
    }
}

void DraftState::release(const std::vector<int64_t> & cells) {
    for (size_t i = cells.size(); i-- > 0;) {
        kv_.cells().release(cells[i]);
    }
}

void DraftState::clear(int32_t sequence) {
    truncate(sequence, 0);
    kv_.clear(sequence);
    // What a prompt left in its rows pads the next one's injection.
    const size_t first = ring_ * features_->nb[1];
    ggml_backend_tensor_memset(features_, 0, first, ggml_nbytes(features_) - first);
}

void DraftState::truncate(int32_t sequence, int32_t position) {
    kv_.groups().front().release_from(sequence, position);
    drop_pending([&](const Pending & feature) {
        return feature.sequence == sequence && feature.position >= position;
    });
}

} // namespace dfl
