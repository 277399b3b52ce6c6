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
    std::vector<Draft> draft(const std::vector<DraftBlock> & blocks, int64_t k,
                             bool log_sum_exp) override;

  private:
    // Features that a draft's own graph takes into the K/V at most: verifies leave no more. What a
    // prompt leaves has a graph of its own.
    int64_t max_injected() const { return 64 + 4 * (host_.sizes.n_parallel - 1); }
    int64_t n_choices() const { return drafter_->head(host_.target).n_out(); }
    BatchShape injection_shape(int64_t n) const;
    void add_injection(CachedGraph & cached) const;
    void build_draft(CachedGraph & cached) const;
    void set_injection(CachedGraph & cached, const std::vector<Feature> & features,
                       const std::vector<int64_t> & cells) const;
    void set_blocks(CachedGraph & cached, const std::vector<DraftBlock> & blocks,
                    const std::vector<int64_t> & cells);
    // Pending features of the blocks' sequences.
    std::vector<Feature> pending_of(const std::vector<DraftBlock> & blocks) const;
    BatchShape shape_of(const std::vector<DraftBlock> & blocks, size_t n_features, int64_t k,
                        bool log_sum_exp);

    RecentMax recent_cells_;
};

// Projects features into the K/V: those of all layers from the same rows, which pass none of the
// layers' own norms.
void DFlashModel::add_injection(CachedGraph & cached) const {
    const int64_t n = cached.shape.n_inject;
    ggml_context * ctx = cached.ctx.get();
    DraftInputs & in = cached.draft;
    in.inject_rows = make_input(ctx, GGML_TYPE_I32, n, 1, "inject_rows");
    in.inject_positions =
        make_input(ctx, GGML_TYPE_I32, drafter_->hparams().layers[0].rope.n_position_ids() * n, 1,
                   "inject_positions");
    in.inject_cells = make_input(ctx, GGML_TYPE_I64, n, 1, "inject_cells");
    GraphContext g = graph_context(cached);
    ggml_tensor * features =
        gather_rows(g, host_.ring.of_drafter(ctx, host_.index), in.inject_rows);
    ggml_tensor * fused = linear(g, g.weights.fusion, features);
    const std::vector<KeyValue> projected = project_kv(g, normed(g, fused, g.weights.fusion_norm));
    for (int il = 0; il < g.hp.n_layer(); ++il) {
        const KeyValue & kv = projected[il];
        ggml_tensor * k_norm = g.weights.layers[il].attn.k_norm;
        store_kv(g, il,
                 {nullptr, kv.k, kv.v, nullptr, k_norm, in.inject_positions, in.inject_cells});
    }
}

void DFlashModel::build_draft(CachedGraph & cached) const {
    cached.in = make_inputs(cached.ctx.get(), drafter_->hparams(), kv_, cached.shape);
    if (cached.shape.n_inject > 0) {
        add_injection(cached);
    }
    GraphContext g = graph_context(cached);
    add_draft_output(cached,
                     build_decoder(g, {mixer_sublayer(self_attention), feed_forward_sublayer()},
                                   drafter_->head(host_.target)));
}

BatchShape DFlashModel::injection_shape(int64_t n) const {
    BatchShape shape;
    shape.kind = GraphKind::INJECT;
    shape.drafter = host_.index;
    shape.n_inject = sizes_.inject_rows(n);
    return shape;
}

void DFlashModel::reserve() {
    host_.graphs.get(injection_shape(host_.ring.n_rows()),
                     [&](CachedGraph & fresh) { add_injection(fresh); });
    BatchShape largest = injection_shape(max_injected());
    largest.kind = GraphKind::DRAFT;
    largest.n_rows = sizes_.draft_rows(host_.sizes.n_verify);
    largest.n_kv = {kv_.cells().n_cells()};
    largest.n_out = largest.n_rows - 1;
    largest.log_sum_exp = true;
    const int64_t n_top = std::min<int64_t>(n_choices(), DFL_MAX_TOP);
    largest.n_top = can_select_on_device(backend_, n_choices(), n_top) ? n_top : 0;
    largest.top_by_blocks = selects_by_blocks(backend_);
    host_.graphs.get(largest, [&](CachedGraph & fresh) { build_draft(fresh); });
}

void DFlashModel::set_injection(CachedGraph & cached, const std::vector<Feature> & features,
                                const std::vector<int64_t> & cells) const {
    // Padding is zeros, and is written where nobody looks.
    const int64_t n = cached.shape.n_inject;
    std::vector<int32_t> positions(n, 0), rows(n, static_cast<int32_t>(host_.ring.zero_row()));
    for (size_t i = 0; i < features.size(); ++i) {
        positions[i] = features[i].position;
        rows[i] = static_cast<int32_t>(features[i].row);
    }
    std::vector<int64_t> to = cells;
    to.resize(n, padding_cell());
    cached.write_positions(cached.draft.inject_positions, positions);
    cached.write(cached.draft.inject_rows, rows);
    cached.write(cached.draft.inject_cells, to);
}

void DFlashModel::catch_up() {
    std::map<int32_t, int32_t> ends; // of each sequence's features
    for (const Feature & feature : pending_) {
        ends[feature.sequence] = feature.position + 1;
    }
    for (const auto & [sequence, end] : ends) {
        slide_window(sequence, end);
    }
    if (pending_.empty()) {
        return;
    }
    CachedGraph & cached = host_.graphs.get(injection_shape(static_cast<int64_t>(pending_.size())),
                                            [&](CachedGraph & fresh) { add_injection(fresh); });
    const std::vector<int64_t> cells = take_cells(pending_);
    try {
        set_injection(cached, pending_, cells);
        host_.graphs.compute(cached);
    } catch (...) {
        release(cells);
        throw;
    }
    pending_.clear();
}

void DFlashModel::set_blocks(CachedGraph & cached, const std::vector<DraftBlock> & blocks,
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
        drafter_->embed(host_.target, tokens.data(), static_cast<int64_t>(tokens.size()), data);
    });
    cached.write_positions(cached.in.positions, positions);
    cached.write(cached.in.cells.front(), to);
    cached.write(cached.in.out_rows, drafted);
    kv_.groups().front().set_rows({positions, to, sequences}, cached.shape.n_kv.front());
}

std::vector<Feature> DFlashModel::pending_of(const std::vector<DraftBlock> & blocks) const {
    std::vector<Feature> features;
    for (const DraftBlock & block : blocks) {
        std::copy_if(pending_.begin(), pending_.end(), std::back_inserter(features),
                     [&](const Feature & one) { return one.sequence == block.sequence; });
    }
    return features;
}

BatchShape DFlashModel::shape_of(const std::vector<DraftBlock> & blocks, size_t n_features,
                                 int64_t k, bool log_sum_exp) {
    BatchShape shape = injection_shape(static_cast<int64_t>(n_features));
    shape.kind = GraphKind::DRAFT;
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
    shape.n_top = can_select_on_device(backend_, n_choices(), k) ? k : 0;
    shape.top_by_blocks = selects_by_blocks(backend_);
    shape.log_sum_exp = log_sum_exp;
    return shape;
}

// What was read of all blocks, block by block.
std::vector<Draft> split_draft(const Draft & all, const std::vector<DraftBlock> & blocks,
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

std::vector<Draft> DFlashModel::draft(const std::vector<DraftBlock> & blocks, int64_t k,
                                      bool log_sum_exp) {
    for (const DraftBlock & block : blocks) {
        slide_window(block.sequence, block.position);
    }
    std::vector<Feature> features = pending_of(blocks);
    if (static_cast<int64_t>(features.size()) > max_injected()) {
        catch_up();
        features.clear();
    }
    const std::vector<int64_t> injected_cells = take_cells(features);
    std::vector<int64_t> cells;
    try {
        cells = take_cells(blocks);
        CachedGraph & cached = host_.graphs.get(shape_of(blocks, features.size(), k, log_sum_exp),
                                                [&](CachedGraph & fresh) { build_draft(fresh); });
        if (cached.shape.n_inject > 0) {
            set_injection(cached, features, injected_cells);
        }
        set_blocks(cached, blocks, cells);
        host_.graphs.compute(cached);
        for (const DraftBlock & block : blocks) {
            drop_pending([&](const Feature & one) { return one.sequence == block.sequence; });
        }
        release(cells); // the blocks' K/V are temporary: the target's features replace them
        return split_draft(read_draft(cached, k, backend_), blocks, k);
    } catch (...) {
        release(cells);
        release(injected_cells);
        throw;
    }
}

} // namespace

std::unique_ptr<DraftModel> attach_dflash(const std::shared_ptr<const Drafter> & drafter,
                                          const DraftHost & host) {
    return std::make_unique<DFlashModel>(drafter, host);
}

} // namespace dfl
