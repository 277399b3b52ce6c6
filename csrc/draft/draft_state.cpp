#include "draft/draft_state.h"

#include "error.h"
#include "layers/host/row_copies.h"

#include <algorithm>
#include <numeric>

namespace dfl {

static int64_t pad(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// The window, one pass or block beside it, and one cell that padding writes to.
static int64_t cells_wanted(int64_t window, int64_t n_ubatch, int64_t max_block) {
    return pad(window + std::max(n_ubatch, max_block) + 1, 256);
}

static LayerPlace on(Backend & backend) {
    return [&](int64_t) -> Backend & { return backend; };
}

DraftState::DraftState(std::shared_ptr<const Drafter> drafter, const Model & target,
                       Devices & devices, ggml_type cache_type, int64_t window, int64_t n_ubatch,
                       int64_t n_verify, int64_t max_block)
    : drafter_(std::move(drafter)), target_(target), backend_(devices.main()), sizes_(devices),
      window_(window), kv_(drafter_->hparams(), on(backend_), cache_type, cache_type,
                           cells_wanted(window, n_ubatch, max_block), max_block),
      no_recurrent_(drafter_->hparams(), on(backend_), 1), n_ubatch_(n_ubatch),
      max_block_(max_block), junk_cell_(kv_.cells().size() - 1) {
    kv_.cells().reserve_last();
    allocate_features(n_verify);
}

void DraftState::allocate_features(int64_t n_verify) {
    ggml_context_ptr ctx(ggml_init({ggml_tensor_overhead(), nullptr, true}));
    ggml_tensor * features =
        ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, drafter_->draft().n_features(),
                           MAX_PENDING + n_verify + n_ubatch_);
    Allocation memory = backend_.allocate(ctx.get(), "the drafter's features");
    ctx_ = std::move(ctx);
    memory_ = std::move(memory);
    features_ = features;
    ring_ = MAX_PENDING + n_verify;
}

void DraftState::grow(int64_t n_verify, GraphPool & graphs) {
    flush(graphs); // what waits lies in the old rows
    allocate_features(n_verify);
}

void DraftState::add_taps(LiveGraph & live, Build & b) {
    live.draft.feature_rows =
        make_input(live.ctx.get(), GGML_TYPE_I64, live.shape.n_rows, 1, "feature_rows");
    ggml_tensor * rows = live.draft.feature_rows;
    b.tap = [this, rows, &b](int il, ggml_tensor * x) {
        const auto & layers = drafter_->draft().target_layers;
        for (size_t i = 0; i < layers.size(); ++i) {
            if (layers[i] == il) {
                ggml_tensor * part = ggml_view_2d(b.ctx, features_, x->ne[0], features_->ne[1],
                                                  features_->nb[1], i * x->ne[0] * sizeof(float));
                put_rows(b, part, x, rows);
            }
        }
    };
}

Build DraftState::make_build(LiveGraph & live) const {
    return {live.ctx.get(),      live.graph,          live.cpu_nodes,
            drafter_->hparams(), drafter_->weights(), kv_,
            no_recurrent_,       live.shape,          live.in};
}

void DraftState::make_injection_inputs(LiveGraph & live) const {
    const int64_t n = live.shape.n_inject;
    const int64_t ids = drafter_->hparams().layers[0].rope.n_position_ids();
    ggml_context * ctx = live.ctx.get();
    live.draft.inject_positions = make_input(ctx, GGML_TYPE_I32, ids * n, 1, "inject_positions");
    live.draft.inject_cells = make_input(ctx, GGML_TYPE_I64, n, 1, "inject_cells");
}

void DraftState::add_prefill_injection(LiveGraph & live) {
    make_injection_inputs(live);
    Build b = make_build(live);
    ggml_tensor * features = ggml_view_2d(b.ctx, features_, features_->ne[0], live.shape.n_inject,
                                          features_->nb[1], ring_ * features_->nb[1]);
    build_injection(b, features, live.draft.inject_positions, live.draft.inject_cells);
}

std::vector<int64_t> DraftState::ring_rows(int64_t n) const {
    std::vector<bool> taken(ring_, false);
    for (const Pending & feature : pending_) {
        taken[feature.row] = true;
    }
    std::vector<int64_t> rows;
    for (int64_t row = 0; row < ring_ && (int64_t)rows.size() < n; ++row) {
        if (!taken[row]) {
            rows.push_back(row);
        }
    }
    return rows;
}

std::vector<int64_t> DraftState::prefill_rows(int64_t n) const {
    std::vector<int64_t> rows(n);
    for (int64_t i = 0; i < n; ++i) {
        rows[i] = ring_ + i;
    }
    return rows;
}

void DraftState::keep(const std::vector<int64_t> & rows, int32_t position) {
    for (const int64_t row : rows) {
        pending_.push_back({row, position++});
    }
}

void DraftState::write_positions(const LiveGraph & live, ggml_tensor * tensor,
                                 const std::vector<int32_t> & positions) const {
    const int64_t n = positions.size();
    live.write<int32_t>(tensor, [&](int32_t * data) {
        for (int64_t i = 0; i < ggml_nelements(tensor); ++i) {
            data[i] = i < 3 * n ? positions[i % n] : 0;
        }
    });
}

void DraftState::forget_unseen(int32_t position) {
    const auto oldest = static_cast<int32_t>(std::max<int64_t>(0, position - window_));
    kv_.cells().release_before(SEQUENCE, oldest);
    const auto first = std::find_if(pending_.begin(), pending_.end(), [&](const Pending & feature) {
        return feature.position >= oldest; // they are in the order of their positions
    });
    pending_.erase(pending_.begin(), first);
}

std::vector<int64_t> DraftState::own_cells(const std::vector<Pending> & features) {
    CellTable & table = kv_.cells();
    const std::vector<int64_t> cells = table.find_free(features.size());
    for (size_t i = 0; i < cells.size(); ++i) {
        table.own(cells[i], SEQUENCE, features[i].position);
    }
    return cells;
}

void DraftState::set_prefill_injection(LiveGraph & live, int32_t position) {
    const int64_t n = live.shape.n_inject;
    forget_unseen(position);
    std::vector<Pending> features;
    std::vector<int32_t> positions;
    for (int64_t i = 0; i < n; ++i) {
        features.push_back({ring_ + i, position + static_cast<int32_t>(i)});
        positions.push_back(features.back().position);
    }
    const std::vector<int64_t> cells = own_cells(features);
    write_positions(live, live.draft.inject_positions, positions);
    live.write<int64_t>(live.draft.inject_cells,
                        [&](int64_t * data) { std::copy(cells.begin(), cells.end(), data); });
}

void DraftState::set_injection(LiveGraph & live, const std::vector<int64_t> & cells) {
    const int64_t n = live.shape.n_inject;
    const int64_t used = pending_.size();
    // Padding repeats a real row and writes where nobody looks.
    auto source = [&](int64_t i) -> const Pending & { return pending_[i < used ? i : 0]; };
    std::vector<int32_t> positions(n);
    for (int64_t i = 0; i < n; ++i) {
        positions[i] = source(i).position;
    }
    write_positions(live, live.draft.inject_positions, positions);
    live.write<int32_t>(live.draft.inject_rows, [&](int32_t * data) {
        for (int64_t i = 0; i < n; ++i) {
            data[i] = static_cast<int32_t>(source(i).row);
        }
    });
    live.write<int64_t>(live.draft.inject_cells, [&](int64_t * data) {
        for (int64_t i = 0; i < n; ++i) {
            data[i] = i < used ? cells[i] : junk_cell_;
        }
    });
}

static void add_pending_injection(LiveGraph & live, Build & b, ggml_tensor * features) {
    live.draft.inject_rows =
        make_input(live.ctx.get(), GGML_TYPE_I32, live.shape.n_inject, 1, "inject_rows");
    build_injection(b, pick_rows(b, features, live.draft.inject_rows), live.draft.inject_positions,
                    live.draft.inject_cells);
}

void DraftState::flush(GraphPool & graphs) {
    if (pending_.empty()) {
        return;
    }
    forget_unseen(pending_.back().position + 1);
    BatchShape shape;
    shape.kind = GraphKind::INJECT;
    shape.n_inject = sizes_.injected(n_pending());
    LiveGraph & live = graphs.get(shape, [&](LiveGraph & fresh) {
        make_injection_inputs(fresh);
        Build b = make_build(fresh);
        add_pending_injection(fresh, b, features_);
    });
    const std::vector<int64_t> cells = own_cells(pending_);
    try {
        set_injection(live, cells);
        graphs.compute(live);
    } catch (...) {
        release(cells);
        throw;
    }
    pending_.clear();
}

void DraftState::build_draft(LiveGraph & live) const {
    BatchShape inputs = live.shape;
    inputs.n_out = inputs.n_rows; // the rows read are a view, not a selection
    live.in = make_inputs(live.ctx.get(), drafter_->hparams(), kv_.masks(), inputs);
    if (live.shape.n_inject > 0) {
        make_injection_inputs(live);
    }
    Build b = make_build(live);
    if (live.shape.n_inject > 0) {
        add_pending_injection(live, b, features_);
    }
    add_draft_output(live, build_block(b, drafter_->head(target_)));
}

void DraftState::reserve(GraphPool & graphs) {
    BatchShape largest;
    largest.kind = GraphKind::DRAFT;
    largest.n_rows = max_block_;
    largest.n_kv = kv_.cells().n_cells();
    largest.n_out = largest.n_rows - 1;
    largest.n_inject = sizes_.injected(ring_);
    largest.log_sum_exp = true;
    const int64_t n_choices = drafter_->head(target_).n_out();
    const int64_t n_top = std::min<int64_t>(n_choices, DFL_MAX_TOP);
    largest.n_top = selects_on_device(backend_, n_choices, n_top) ? n_top : 0;
    largest.top_by_blocks = selects_by_blocks(backend_);
    graphs.get(largest, [&](LiveGraph & fresh) { build_draft(fresh); });
}

void DraftState::set_block(LiveGraph & live, int32_t last_token, int32_t position,
                           const std::vector<int64_t> & cells) {
    const int64_t n = live.shape.n_rows;
    std::vector<int32_t> tokens(n, drafter_->draft().mask_token);
    tokens[0] = last_token;
    std::vector<int32_t> positions(n);
    std::iota(positions.begin(), positions.end(), position);
    live.write<float>(live.in.embd,
                      [&](float * data) { drafter_->embed(target_, tokens.data(), n, data); });
    write_positions(live, live.in.positions, positions);
    live.write<int64_t>(live.in.cells,
                        [&](int64_t * data) { std::copy(cells.begin(), cells.end(), data); });
    kv_.set_rows({positions, cells, nullptr}, live.shape.n_kv);
}

Draft DraftState::run_block(GraphPool & graphs, int32_t last_token, int32_t position,
                            int64_t n_draft, int64_t k, bool log_sum_exp) {
    CellTable & table = kv_.cells();
    forget_unseen(position);
    const std::vector<int64_t> injected = own_cells(pending_);
    const std::vector<int64_t> cells = table.find_free(n_draft + 1);
    for (size_t i = 0; i < cells.size(); ++i) {
        table.own(cells[i], SEQUENCE, position + static_cast<int32_t>(i));
    }
    BatchShape shape;
    shape.kind = GraphKind::DRAFT;
    shape.n_rows = n_draft + 1;
    // The cell that padding writes to is read too: CUDA's flash attention is at its best over
    // multiples of 256 cells.
    shape.n_kv = sizes_.cells(table.high(), table.n_cells());
    shape.n_out = n_draft;
    shape.n_inject = sizes_.injected(n_pending());
    const int64_t n_choices = drafter_->head(target_).n_out();
    shape.n_top = selects_on_device(backend_, n_choices, k) ? k : 0;
    shape.top_by_blocks = selects_by_blocks(backend_);
    shape.log_sum_exp = log_sum_exp;
    LiveGraph * live = nullptr;
    try {
        live = &graphs.get(shape, [&](LiveGraph & fresh) { build_draft(fresh); });
        if (shape.n_inject > 0) {
            set_injection(*live, injected);
        }
        set_block(*live, last_token, position, cells);
        graphs.compute(*live);
    } catch (...) {
        release(cells);
        release(injected);
        throw;
    }
    pending_.clear();
    release(cells); // the block is noise: the target's features will stand there
    return read_draft(*live, k, backend_);
}

void DraftState::release(const std::vector<int64_t> & cells) {
    for (const int64_t cell : cells) {
        kv_.cells().release(cell);
    }
}

void DraftState::clear() {
    truncate(0);
    kv_.clear();
    ggml_backend_buffer_clear(memory_.buffer.get(), 0);
}

void DraftState::truncate(int32_t position) {
    kv_.cells().release_from(SEQUENCE, position);
    pending_.erase(
        std::remove_if(pending_.begin(), pending_.end(),
                       [&](const Pending & feature) { return feature.position >= position; }),
        pending_.end());
}

} // namespace dfl
