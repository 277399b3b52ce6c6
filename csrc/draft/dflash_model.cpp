#include "draft/dflash_model.h"

#include "dflash.h"
#include "layers/attention.h"
#include "layers/cpu_ops/row_copies.h"
#include "layers/decoder.h"
#include "layers/linear.h"

namespace dfl {

namespace {

class DFlashModel : public DraftModel {
  public:
    using DraftModel::DraftModel;

    void reserve() override;
    void catch_up() override;
    Draft draft(const std::vector<DraftBlock> & blocks, int64_t k) override;

  private:
    CachedGraph & injection(int64_t n) const;
    CachedGraph & graph_of(const BatchShape & shape) const;
    void set_inputs(CachedGraph & cached, const std::vector<DraftBlock> & blocks,
                    const std::vector<int64_t> & cells);
    BatchShape shape_of(const std::vector<DraftBlock> & blocks, int64_t k);

    RecentMax recent_cells_;
};

// Projects features into the K/V: those of all layers from the same rows, which pass none of the
// layers' own norms.
CachedGraph & DFlashModel::injection(int64_t n) const {
    BatchShape shape;
    shape.kind = GraphKind::INJECT;
    shape.drafter = host_.index;
    shape.n_rows = sizes_.inject_rows(n);
    return host_.graphs.get(shape, [&](CachedGraph & cached) {
        ggml_context * ctx = cached.ctx.get();
        const int64_t n_ids = drafter_->hparams().layers[0].rope.n_position_ids();
        cached.feature_rows = make_input(ctx, GGML_TYPE_I32, shape.n_rows, 1, "feature_rows");
        cached.in.positions = make_input(ctx, GGML_TYPE_I32, n_ids * shape.n_rows, 1, "positions");
        cached.in.cells = {make_input(ctx, GGML_TYPE_I64, shape.n_rows, 1, "cells")};
        GraphContext g = graph_context(cached);
        ggml_tensor * features =
            gather_rows(g, host_.ring.of_drafter(ctx, host_.index), cached.feature_rows);
        ggml_tensor * fused = linear(g, g.weights.fusion, features);
        const std::vector<KeyValue> kv = project_kv(g, normed(g, fused, g.weights.fusion_norm));
        for (int il = 0; il < g.hp.n_layer(); ++il) {
            ggml_tensor * k_norm = g.weights.layers[il].attn.k_norm;
            store_kv(
                g, il,
                {nullptr, kv[il].k, kv[il].v, nullptr, k_norm, g.in.positions, row_cells(g, il)});
        }
    });
}

CachedGraph & DFlashModel::graph_of(const BatchShape & shape) const {
    return host_.graphs.get(shape, [&](CachedGraph & cached) {
        cached.in = make_inputs(cached.ctx.get(), drafter_->hparams(), kv_, shape);
        GraphContext g = graph_context(cached);
        add_draft_output(cached,
                         build_decoder(g, {mixer_sublayer(self_attention), feed_forward_sublayer()},
                                       drafter_->head(host_.target)));
    });
}

void DFlashModel::reserve() {
    injection(host_.ring.n_rows());
    BatchShape largest;
    largest.kind = GraphKind::DRAFT;
    largest.drafter = host_.index;
    largest.n_rows = sizes_.draft_rows(host_.sizes.n_verify);
    largest.n_kv = {kv_.cells().n_cells()};
    largest.n_out = largest.n_rows - 1;
    select_top(largest, DFL_MAX_TOP);
    graph_of(largest);
}

void DFlashModel::catch_up() {
    std::map<int32_t, int32_t> ends; // first position of each sequence without features
    for (const Feature & feature : pending_) {
        ends[feature.sequence] = feature.position + 1;
    }
    for (const auto & [sequence, end] : ends) {
        slide_window(sequence, end);
    }
    if (pending_.empty()) {
        return;
    }
    CachedGraph & cached = injection(static_cast<int64_t>(pending_.size()));
    std::vector<int64_t> cells = take_cells(pending_);
    try {
        // Pad with rows of zeros that go to a cell of their own.
        const int64_t n = cached.shape.n_rows;
        std::vector<int32_t> positions(n, 0), rows(n, static_cast<int32_t>(host_.ring.zero_row()));
        for (size_t i = 0; i < pending_.size(); ++i) {
            positions[i] = pending_[i].position;
            rows[i] = static_cast<int32_t>(pending_[i].row);
        }
        std::vector<int64_t> to = cells;
        to.resize(n, kv_.cells().size() - 1);
        cached.write_positions(cached.in.positions, positions);
        cached.write(cached.feature_rows, rows);
        cached.write(cached.in.cells.front(), to);
        host_.graphs.compute(cached);
    } catch (...) {
        release(cells);
        throw;
    }
    pending_.clear();
}

void DFlashModel::set_inputs(CachedGraph & cached, const std::vector<DraftBlock> & blocks,
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
            if (i > 0) { // a mask's row predicts its own position
                drafted.push_back(static_cast<int32_t>(first + i));
            }
        }
    }
    // Pad with copies of the last block's first row, which write the same keys and values.
    const int64_t last = sequences.back().first;
    tokens.resize(cached.shape.n_rows, tokens[last]);
    positions.resize(cached.shape.n_rows, positions[last]);
    to.resize(cached.shape.n_rows, to[last]);
    drafted.resize(cached.shape.n_out, static_cast<int32_t>(last));
    cached.write<float>(cached.in.embd, [&](float * data) {
        drafter_->embed(host_.target, tokens.data(), static_cast<int64_t>(tokens.size()), data);
    });
    cached.write_positions(cached.in.positions, positions);
    cached.write(cached.in.cells.front(), to);
    cached.write(cached.in.out_rows, drafted);
    kv_.groups().front().set_rows({positions, to, sequences}, cached.shape.n_kv.front());
}

BatchShape DFlashModel::shape_of(const std::vector<DraftBlock> & blocks, int64_t k) {
    BatchShape shape;
    shape.kind = GraphKind::DRAFT;
    shape.drafter = host_.index;
    for (const DraftBlock & block : blocks) {
        shape.n_rows += block.n_draft + 1;
        shape.n_out += block.n_draft;
    }
    shape.n_rows = sizes_.draft_rows(shape.n_rows);
    if (sizes_.serves_many()) {
        shape.n_out = shape.n_rows - 1;
    } else if (const int64_t n = sizes_.draft_rows(shape.n_out); n > shape.n_out) {
        shape.n_out = std::min(n, shape.n_rows - 1);
    }
    // The cell that padding writes to is read too: CUDA's flash attention is at its best over
    // multiples of 256 cells.
    const CellTable & table = kv_.cells();
    const bool has_masks = !kv_.groups().front().masks().empty();
    shape.n_kv = {sizes_.cells(table.high(), table.n_cells(), has_masks, recent_cells_)};
    select_top(shape, k);
    return shape;
}

Draft DFlashModel::draft(const std::vector<DraftBlock> & blocks, int64_t k) {
    catch_up();
    size_t n_drafted = 0;
    for (const DraftBlock & block : blocks) {
        slide_window(block.sequence, block.position);
        n_drafted += block.n_draft;
    }
    const std::vector<int64_t> cells = take_cells(blocks);
    Draft draft;
    try {
        CachedGraph & cached = graph_of(shape_of(blocks, k));
        set_inputs(cached, blocks, cells);
        host_.graphs.compute(cached);
        draft = read_draft(cached, k, backend_);
    } catch (...) {
        release(cells);
        throw;
    }
    release(cells); // the blocks' K/V are temporary: the target's features replace them
    draft.best.resize(n_drafted * k); // the rest is padding
    draft.log_sum_exp.resize(n_drafted);
    return draft;
}

} // namespace

std::unique_ptr<DraftModel> attach_dflash(const std::shared_ptr<const Drafter> & drafter,
                                          const DraftHost & host) {
    return std::make_unique<DFlashModel>(drafter, host);
}

} // namespace dfl
