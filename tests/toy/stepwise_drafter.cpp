// A made-up kind of drafter that drafts step by step, as MTP does: one layer with K/V of every
// position. Row p takes token p and the target's final hidden state at p - 1, or the drafter's own
// hidden state after a drafted token. A step runs one row.
#include "arch/arch.h"
#include "draft/draft_model.h"
#include "gguf_schema.h"
#include "layers/attention.h"
#include "layers/linear.h"

#include <map>
#include <numeric>

namespace dfl {

static bool is_stepwise(const GgufFile & file) { return file.arch() == "stepwise"; }

static DraftHparams read(const GgufFile & file, const Model & target) {
    DraftHparams draft;
    draft.hp = read_common_hparams(file, {GGML_ROPE_TYPE_NEOX});
    draft.taps = {target.hparams().n_layer() + 1};
    draft.block_size = file.need_integer(schema::KEY_BLOCK_SIZE, 2, 1024);
    draft.sees_all = true;
    return draft;
}

static void bind(WeightLoader & loader, const DraftHparams & draft) {
    const int64_t n = draft.hp.n_embd;
    Weights & w = loader.weights();
    w.own["fc"] = loader.linear(schema::TENSOR_FC, 0, 2 * n, n);
    w.fusion_norm = loader.vector(schema::TENSOR_ENC_OUTPUT_NORM, 0, n);
    w.output_norm = loader.vector(schema::TENSOR_OUTPUT_NORM, 0, n);
    bind_transformer_block(loader, 0, {});
}

namespace {

class StepwiseModel : public DraftModel {
  public:
    using DraftModel::DraftModel;

    void reserve() override {
        run_graph(shape_of(host_.sizes.n_ubatch, 0));
        run_graph(shape_of(1, 1));
    }

    void catch_up() override {
        while (!pending_.empty()) {
            const Feature first = pending_.front();
            Steps steps = {first.sequence, first.position, {}, {}};
            std::vector<Feature> taken;
            for (const Feature & feature : pending_) {
                if (feature.sequence == first.sequence &&
                    static_cast<int64_t>(taken.size()) < host_.sizes.n_ubatch) {
                    const std::vector<float> hidden =
                        hidden_before(first.sequence, feature.position);
                    steps.hidden.insert(steps.hidden.end(), hidden.begin(), hidden.end());
                    steps.tokens.push_back(feature.token);
                    last_[first.sequence] = {feature.position, values_of(feature)};
                    taken.push_back(feature);
                }
            }
            const std::vector<int64_t> cells = take_cells(taken);
            try {
                run(steps, cells, 0);
            } catch (...) {
                release(cells);
                throw;
            }
            const int32_t end = taken.back().position + 1;
            drop_pending([&](const Feature & feature) {
                return feature.sequence == first.sequence && feature.position < end;
            });
        }
    }

    Draft draft(const std::vector<DraftBlock> & blocks, int64_t k) override {
        catch_up();
        Draft draft;
        for (const DraftBlock & block : blocks) {
            const std::vector<int64_t> cells = take_cells(std::vector<DraftBlock>{block});
            try {
                add_steps(block, cells, k, draft);
            } catch (...) {
                release(cells);
                throw;
            }
            release(cells); // cells are refilled from the target's hidden states
        }
        return draft;
    }

    void truncate(int32_t sequence, int32_t position) override {
        DraftModel::truncate(sequence, position);
        const auto last = last_.find(sequence);
        if (last != last_.end() && last->second.position >= position) {
            last_.erase(last);
        }
    }

  private:
    // Tokens of a sequence from `position` on, and the hidden state before each: [n_embd, n].
    struct Steps {
        int32_t sequence, position;
        std::vector<int32_t> tokens;
        std::vector<float> hidden;
    };
    // The target's final hidden state at a position.
    struct Hidden {
        int32_t position = -1;
        std::vector<float> values;
    };

    std::vector<float> values_of(const Feature & feature) const {
        ggml_context_ptr ctx(ggml_init({ggml_tensor_overhead(), nullptr, true}));
        const ggml_tensor * rows = host_.ring.of_drafter(ctx.get(), host_.index);
        std::vector<float> values(rows->ne[0]);
        backend_.read(rows, values.data(), feature.row * rows->nb[1],
                      ggml_row_size(rows->type, rows->ne[0]));
        return values;
    }

    void add_steps(const DraftBlock & block, const std::vector<int64_t> & cells, int64_t k,
                   Draft & draft) {
        Steps step = {block.sequence, block.position, {block.last_token}, {}};
        step.hidden = hidden_before(block.sequence, block.position);
        for (int64_t i = 0; i < block.n_draft; ++i, ++step.position) {
            const CachedGraph & done = run(step, {cells[i]}, 1);
            const Draft row = read_draft(done, k, backend_);
            draft.best.insert(draft.best.end(), row.best.begin(), row.best.end());
            draft.log_sum_exp.push_back(row.log_sum_exp.front());
            step.tokens = {drafter_->token(row.best.front().token)};
            const ggml_tensor * left = ggml_get_tensor(done.ctx.get(), "left");
            backend_.read(left, step.hidden.data(), 0, ggml_nbytes(left));
        }
    }

    // Returns the target's hidden state, or zeros where it is unknown: at the start of a sequence
    // and after a restored prefix.
    std::vector<float> hidden_before(int32_t sequence, int32_t position) const {
        const auto last = last_.find(sequence);
        if (last != last_.end() && last->second.position == position - 1) {
            return last->second.values;
        }
        return std::vector<float>(drafter_->hparams().n_embd, 0.0f);
    }

    BatchShape shape_of(int64_t n_rows, int64_t n_out) {
        BatchShape shape;
        shape.kind = n_out > 0 ? GraphKind::DRAFT : GraphKind::INJECT;
        shape.drafter = host_.index;
        shape.n_rows = n_rows;
        shape.n_out = n_out;
        const bool has_masks = !kv_.groups().front().masks().empty();
        shape.n_kv = {sizes_.cells(kv_.cells().high(), kv_.cells().n_cells(), has_masks)};
        return shape;
    }

    CachedGraph & run_graph(const BatchShape & shape) {
        return host_.graphs.get(shape, [&](CachedGraph & cached) {
            ggml_context * ctx = cached.ctx.get();
            cached.in = make_inputs(ctx, drafter_->hparams(), kv_, shape);
            GraphContext g = graph_context(cached);
            ggml_tensor * hidden =
                make_input(ctx, GGML_TYPE_F32, g.hp.n_embd, shape.n_rows, "hidden");
            ggml_tensor * normed = rms_norm(g, hidden, g.weights.fusion_norm);
            g.in.embd = linear(g, g.weights.own.at("fc"), ggml_concat(ctx, g.in.embd, normed, 0));
            g.taps_output = shape.n_out > 0;
            g.tap = [&](int il, ggml_tensor * x) {
                if (il == g.hp.n_layer() + 1) {
                    ggml_set_name(add_output(cached, x), "left");
                }
            };
            ggml_tensor * logits =
                build_decoder(g, {mixer_sublayer(self_attention), feed_forward_sublayer()},
                              drafter_->head(host_.target));
            if (logits != nullptr) {
                add_draft_output(cached, logits);
            }
        });
    }

    CachedGraph & run(const Steps & steps, const std::vector<int64_t> & cells, int64_t n_out) {
        const auto n = static_cast<int64_t>(steps.tokens.size());
        CachedGraph & cached = run_graph(shape_of(n, n_out));
        cached.write<float>(cached.in.embd, [&](float * data) { embed(steps.tokens, data); });
        std::vector<int32_t> positions(n);
        std::iota(positions.begin(), positions.end(), steps.position);
        cached.write_positions(cached.in.positions, positions);
        cached.write(cached.in.cells.front(), cells);
        cached.write(ggml_get_tensor(cached.ctx.get(), "hidden"), steps.hidden);
        kv_.groups().front().set_rows({positions, cells, {{steps.sequence, 0, n, nullptr}}},
                                      cached.shape.n_kv.front());
        host_.graphs.compute(cached);
        return cached;
    }

    std::map<int32_t, Hidden> last_; // last hidden state of sequences with complete K/V
};

} // namespace

static std::unique_ptr<DraftModel> attach(const std::shared_ptr<const Drafter> & drafter,
                                          const DraftHost & host) {
    return std::make_unique<StepwiseModel>(drafter, host);
}

extern const DraftKind STEPWISE = {"stepwise", is_stepwise, read, bind, attach};

} // namespace dfl
