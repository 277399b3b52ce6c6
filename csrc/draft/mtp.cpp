// The MTP (multi-token prediction) layer of Qwen3-Next, Qwen3.5 and later: one layer that drafts
// step by step. Row p takes token p and the final hidden state at p - 1: the target's, or after a
// drafted token the layer's own. Source: llama.cpp, src/models/qwen35.cpp, graph_mtp.
#include "arch/arch.h"
#include "draft/draft_model.h"
#include "error.h"
#include "gguf_schema.h"
#include "layers/attention.h"
#include "layers/cpu_ops/row_copies.h"
#include "layers/linear.h"

#include <algorithm>
#include <numeric>

namespace dfl {

// Rows of the longest draft, last_token included. The layer was trained to predict one token ahead,
// so acceptance falls with the depth of a draft.
static constexpr int64_t BLOCK_SIZE = 8;
// Last tokens of a prompt that get K/V. The layer reads the target's last hidden states, which a
// prefill computes for such tokens only: for all of a prompt, 24 layers would lose 3 to 4 %.
static constexpr int64_t PROMPT_WINDOW = 256;

// True for a file of MTP layer alone, and for a target's own file with one.
static bool is_mtp(const GgufFile & file) {
    const char * archs[] = {schema::ARCH_QWEN35, schema::ARCH_QWEN35MOE, schema::ARCH_QWEN3NEXT};
    if (std::none_of(std::begin(archs), std::end(archs),
                     [&](const char * name) { return file.arch() == name; }) ||
        file.integer(schema::KEY_NEXTN_PREDICT_LAYERS).value_or(0) != 1) {
        return false;
    }
    const auto n_block = static_cast<int>(file.integer(schema::KEY_BLOCK_COUNT).value_or(0));
    return file.tensor(tensor_name(schema::TENSOR_NEXTN_EH_PROJ, n_block - 1)) != nullptr;
}

static DraftHparams read(const GgufFile & file, const Model & target) {
    DFL_CHECK(file.arch() == target.file().arch(), DFL_STATUS_FILE,
              "%s: its MTP layer is of architecture \"%s\", the target %s is of \"%s\"",
              file.path().c_str(), file.arch().c_str(), target.file().path().c_str(),
              target.file().arch().c_str());
    DraftHparams draft;
    draft.hp = target.arch().read(file);
    const int64_t n_trunk = draft.hp.n_layer(), n_layer = target.hparams().n_layer();
    DFL_CHECK(n_trunk == n_layer, DFL_STATUS_FILE,
              "%s: its MTP layer follows %lld layers, the target %s has %lld", file.path().c_str(),
              (long long)n_trunk, target.file().path().c_str(), (long long)n_layer);
    LayerShape layer = draft.hp.layers.back();
    layer.recurrent = false;
    layer.value_is_key = true; // keeps Q apart, which the K/V of committed tokens do not need
    draft.hp.layers = {layer};
    draft.first_block = static_cast<int>(n_trunk);
    draft.taps = {n_layer + 1};
    draft.block_size = BLOCK_SIZE;
    draft.prompt_window = PROMPT_WINDOW;
    for (const char * key : {schema::KEY_TOKENIZER_EOS_ID, schema::KEY_TOKENIZER_EOT_ID,
                             schema::KEY_TOKENIZER_EOM_ID}) {
        const int64_t token = target.file().integer(key).value_or(-1);
        if (token >= 0 && token < target.hparams().n_vocab) {
            draft.end_tokens.push_back(token);
        }
    }
    std::sort(draft.end_tokens.begin(), draft.end_tokens.end());
    return draft;
}

// Loads the head's rows of the tokens that are drafted, if they are not all.
static void bind_reduced_head(WeightLoader & loader, const DraftHparams & draft) {
    loader.head_map();
    std::vector<int64_t> & tokens = loader.weights().head_tokens;
    const auto n_listed = static_cast<int64_t>(tokens.size());
    if (draft.n_head_tokens > 0) {
        tokens.resize(draft.n_head_tokens);
        std::iota(tokens.begin(), tokens.end(), 0);
        for (const int64_t end : draft.end_tokens) {
            if (end > tokens.back()) {
                tokens.push_back(end);
            }
        }
    }
    if (tokens.empty()) {
        return;
    }
    for (const int64_t end : draft.end_tokens) {
        DFL_CHECK(std::find(tokens.begin(), tokens.end(), end) != tokens.end(), DFL_STATUS_FILE,
                  "%s: tensor %s lacks the end token %lld", loader.path().c_str(),
                  schema::TENSOR_D2T, (long long)end);
    }
    const char * heads[] = {schema::TENSOR_NEXTN_SHARED_HEAD_HEAD, schema::TENSOR_OUTPUT,
                            schema::TENSOR_TOKEN_EMBD};
    const char * head = *std::find_if(std::begin(heads), std::end(heads) - 1,
                                      [&](const char * x) { return loader.has(x, 0); });
    DFL_CHECK(loader.n_rows(head) > 0, DFL_STATUS_FILE,
              "%s: a layer that drafts a part of the vocabulary needs the tensor %s or %s",
              loader.path().c_str(), schema::TENSOR_TOKEN_EMBD, schema::TENSOR_OUTPUT);
    DFL_CHECK(draft.n_head_tokens == 0 || n_listed == 0 || n_listed == draft.hp.n_vocab ||
                  loader.n_rows(head) != n_listed,
              DFL_STATUS_FILE,
              "%s: has a head of the %lld tokens of its %s only, draft_vocab (--draft-vocab) is "
              "%lld: leave it out",
              loader.path().c_str(), (long long)n_listed, schema::TENSOR_D2T,
              (long long)draft.n_head_tokens);
    const auto n = static_cast<int64_t>(tokens.size());
    if (draft.n_head_tokens == 0 && n < draft.hp.n_vocab && loader.n_rows(head) == n) {
        loader.weights().output = loader.linear(head, 0, draft.hp.n_embd, n);
    } else {
        loader.reduced_head(head);
    }
}

static void bind_mixer(WeightLoader & loader, int il) {
    const LayerShape & shape = loader.hparams().layers[il];
    loader.attention(il, 2 * shape.head_dim * shape.n_head);
}

static void bind(WeightLoader & loader, const DraftHparams & draft) {
    const int64_t n = draft.hp.n_embd, n_vocab = draft.hp.n_vocab;
    Weights & w = loader.weights();
    w.own["eh_proj"] = loader.linear(schema::TENSOR_NEXTN_EH_PROJ, 0, 2 * n, n);
    w.fusion_norm = loader.vector(schema::TENSOR_NEXTN_HNORM, 0, n);
    w.embedding_norm = loader.vector(schema::TENSOR_NEXTN_ENORM, 0, n);
    const bool has_norm = loader.has(schema::TENSOR_NEXTN_SHARED_HEAD_NORM, 0);
    w.output_norm = loader.vector(
        has_norm ? schema::TENSOR_NEXTN_SHARED_HEAD_NORM : schema::TENSOR_OUTPUT_NORM, 0, n);
    if (loader.has(schema::TENSOR_NEXTN_EMBED_TOKENS, 0)) {
        loader.token_embeddings(schema::TENSOR_NEXTN_EMBED_TOKENS);
    }
    bind_reduced_head(loader, draft);
    if (!w.output && loader.has(schema::TENSOR_NEXTN_SHARED_HEAD_HEAD, 0)) {
        w.output = loader.linear(schema::TENSOR_NEXTN_SHARED_HEAD_HEAD, 0, n, n_vocab);
    }
    BlockOptions options;
    options.head_norms = true;
    options.ffn_norm = schema::TENSOR_POST_ATTENTION_NORM;
    options.bind_mixer = bind_mixer;
    bind_transformer_block(loader, 0, options);
    // Embeddings and head are the target's, also where a file repeats them.
    for (const char * name : {schema::TENSOR_OUTPUT_NORM, schema::TENSOR_OUTPUT}) {
        loader.ignore(name, 0);
    }
}

namespace {

class MtpModel : public DraftModel {
  public:
    using DraftModel::DraftModel;

    void reserve() override;
    void catch_up() override;
    Draft draft(const std::vector<DraftBlock> & blocks, int64_t k) override;
    void truncate(int32_t sequence, int32_t position) override;

  private:
    // A final hidden state of the target, [n_embd].
    struct Hidden {
        int32_t position;
        std::vector<float> values;
    };
    // Rows of one step: a row for each sequence.
    struct Step {
        std::vector<SequenceRows> sequences;
        std::vector<int32_t> tokens, positions;
        std::vector<int64_t> cells;
        std::vector<const float *> hidden; // hidden state before each row; NULL: zeros
    };

    int64_t n_embd() const { return drafter_->hparams().n_embd; }
    // Returns the target's hidden state at position - 1; NULL if it is unknown.
    const float * hidden_before(int32_t sequence, int32_t position) const;
    void write_hidden(CachedGraph & cached, const std::vector<const float *> & rows) const;
    CachedGraph & injection(int64_t n_rows, int64_t n_sequences) const;
    CachedGraph & graph_of(const BatchShape & shape) const;
    // Computes a step. Returns the k best candidates of each row, and writes the layer's final
    // hidden state after each row to `left`.
    Draft run(const Step & step, int64_t k, std::vector<std::vector<float>> & left);

    RecentMax recent_cells_;
    // The target's last hidden state of each sequence that has K/V: unknown after a restored
    // prefix, where zeros stand for it.
    std::map<int32_t, Hidden> last_;
};

// Adds (projection of the normed embeddings and the normed hidden states before them), the input
// of the layer.
ggml_tensor * layer_input(GraphContext & g, ggml_tensor * embd, ggml_tensor * hidden) {
    ggml_tensor * both = ggml_concat(g.ctx, rms_norm(g, embd, g.weights.embedding_norm),
                                     rms_norm(g, hidden, g.weights.fusion_norm), 0);
    return linear(g, g.weights.own.at("eh_proj"), both);
}

// Returns the graph that computes the K/V of committed tokens from features of n_sequences
// sequences. Inputs beside the usual: `hidden`, the state before each sequence's first row, then a
// row of zeros; `order`, for each row the index of the state before it, in the features followed by
// `hidden`; `ends`, each sequence's last row.
CachedGraph & MtpModel::injection(int64_t n_rows, int64_t n_sequences) const {
    BatchShape shape;
    shape.kind = GraphKind::INJECT;
    shape.drafter = host_.index;
    shape.n_rows = sizes_.inject_rows(n_rows);
    shape.n_out = sizes_.lanes(n_sequences);
    return host_.graphs.get(shape, [&](CachedGraph & cached) {
        ggml_context * ctx = cached.ctx.get();
        const int64_t n = shape.n_rows, m = shape.n_out;
        const int64_t n_ids = drafter_->hparams().layers[0].rope.n_position_ids();
        cached.in.embd = make_input(ctx, GGML_TYPE_F32, n_embd(), n, "embd");
        cached.in.positions = make_input(ctx, GGML_TYPE_I32, n_ids * n, 1, "positions");
        cached.in.cells = {make_input(ctx, GGML_TYPE_I64, n, 1, "cells")};
        cached.feature_rows = make_input(ctx, GGML_TYPE_I32, n, 1, "feature_rows");
        ggml_tensor * before = make_input(ctx, GGML_TYPE_F32, n_embd(), m + 1, "hidden");
        ggml_tensor * order = make_input(ctx, GGML_TYPE_I32, n, 1, "order");
        ggml_tensor * ends = make_input(ctx, GGML_TYPE_I32, m, 1, "ends");
        GraphContext g = graph_context(cached);
        ggml_tensor * features =
            gather_rows(g, host_.ring.of_drafter(ctx, host_.index), cached.feature_rows);
        ggml_set_name(add_result(cached, gather_rows(g, features, ends)), "left");
        ggml_tensor * hidden = gather_rows(g, ggml_concat(ctx, features, before, 1), order);
        const AttentionWeights & w = g.weights.layers[0].attn;
        const LayerShape & layer = g.hp.layers[0];
        const Rows x =
            normed(g, layer_input(g, cached.in.embd, hidden), g.weights.layers[0].attn_norm);
        ggml_tensor *k = nullptr, *v = nullptr;
        if (w.qkv) {
            const Projections p = project_qkv(g, 0, x, 2 * layer.head_dim * layer.n_head);
            k = p.k;
            v = p.v;
        } else {
            const KeyValue kv = project_kv(g, x).front();
            k = kv.k;
            v = kv.v;
        }
        store_kv(g, 0, {nullptr, k, v, nullptr, w.k_norm, g.in.positions, row_cells(g, 0)});
    });
}

CachedGraph & MtpModel::graph_of(const BatchShape & shape) const {
    return host_.graphs.get(shape, [&](CachedGraph & cached) {
        ggml_context * ctx = cached.ctx.get();
        cached.in = make_inputs(ctx, drafter_->hparams(), kv_, shape);
        GraphContext g = graph_context(cached);
        ggml_tensor * hidden = make_input(ctx, GGML_TYPE_F32, n_embd(), shape.n_rows, "hidden");
        g.in.embd = layer_input(g, g.in.embd, hidden);
        g.taps_output = true;
        g.tap = [&](int il, ggml_tensor * x) {
            if (il == g.hp.n_layer() + 1) {
                ggml_set_name(add_result(cached, x), "left");
            }
        };
        add_draft_output(
            cached, build_decoder(g, {mixer_sublayer(gated_attention), feed_forward_sublayer()},
                                  drafter_->head(host_.target)));
    });
}

void MtpModel::reserve() {
    injection(host_.ring.n_rows(), host_.sizes.n_parallel);
    BatchShape largest;
    largest.kind = GraphKind::DRAFT;
    largest.drafter = host_.index;
    largest.n_rows = largest.n_out = sizes_.draft_rows(host_.sizes.n_parallel);
    largest.n_kv = {kv_.cells().n_cells()};
    select_top(largest, DFL_MAX_TOP);
    graph_of(largest);
}

const float * MtpModel::hidden_before(int32_t sequence, int32_t position) const {
    const auto last = last_.find(sequence);
    const bool is_known = last != last_.end() && last->second.position == position - 1;
    return is_known ? last->second.values.data() : nullptr;
}

void MtpModel::write_hidden(CachedGraph & cached, const std::vector<const float *> & rows) const {
    ggml_tensor * input = ggml_get_tensor(cached.ctx.get(), "hidden");
    cached.write<float>(input, [&](float * data) {
        std::fill_n(data, ggml_nelements(input), 0.0f);
        for (size_t i = 0; i < rows.size(); ++i) {
            if (rows[i] != nullptr) {
                std::copy_n(rows[i], n_embd(), data + i * n_embd());
            }
        }
    });
}

void MtpModel::catch_up() {
    std::map<int32_t, int32_t> last_positions;
    for (const Feature & feature : pending_) {
        last_positions[feature.sequence] = feature.position;
    }
    for (const auto & [sequence, position] : last_positions) {
        slide_window(sequence, position + 1);
    }
    if (pending_.empty()) {
        return;
    }
    const auto n = static_cast<int64_t>(pending_.size());
    CachedGraph & cached = injection(n, static_cast<int64_t>(last_positions.size()));
    const int64_t n_padded = cached.shape.n_rows;
    const auto zero_row = static_cast<int32_t>(n_padded + cached.shape.n_out);
    std::vector<int32_t> tokens, positions, rows, order, ends;
    std::vector<const float *> before;
    std::map<int32_t, size_t> index; // index in `ends` and `before`, by sequence
    for (int64_t i = 0; i < n; ++i) {
        const Feature & feature = pending_[i];
        const auto [at, is_first] = index.emplace(feature.sequence, ends.size());
        if (is_first) {
            before.push_back(hidden_before(feature.sequence, feature.position));
            ends.push_back(0);
            order.push_back(static_cast<int32_t>(n_padded + at->second));
        } else { // rows in between may have left the window of the prompt's end
            const int32_t last = ends[at->second];
            const bool is_next = pending_[last].position == feature.position - 1;
            order.push_back(is_next ? last : zero_row);
        }
        ends[at->second] = static_cast<int32_t>(i);
        tokens.push_back(feature.token);
        positions.push_back(feature.position);
        rows.push_back(static_cast<int32_t>(feature.row));
    }
    std::vector<int64_t> cells = take_cells(pending_);
    try {
        // Pad with rows of zeros that go to the reserved cell, which follows the usable ones.
        tokens.resize(n_padded, tokens.back());
        positions.resize(n_padded, 0);
        rows.resize(n_padded, static_cast<int32_t>(host_.ring.zero_row()));
        order.resize(n_padded, zero_row);
        std::vector<int64_t> to = cells;
        to.resize(n_padded, kv_.cells().size());
        ends.resize(cached.shape.n_out, 0);
        cached.write<float>(cached.in.embd, [&](float * data) { embed(tokens, data); });
        cached.write_positions(cached.in.positions, positions);
        cached.write(cached.in.cells.front(), to);
        cached.write(cached.feature_rows, rows);
        cached.write(ggml_get_tensor(cached.ctx.get(), "order"), order);
        cached.write(ggml_get_tensor(cached.ctx.get(), "ends"), ends);
        write_hidden(cached, before);
        host_.graphs.compute(cached);
    } catch (...) {
        release(cells);
        throw;
    }
    const auto * left = cached.values<float>(ggml_get_tensor(cached.ctx.get(), "left"));
    for (const auto & [sequence, i] : index) {
        const float * values = left + i * n_embd();
        last_[sequence] = {last_positions[sequence], {values, values + n_embd()}};
    }
    pending_.clear();
}

Draft MtpModel::run(const Step & step, int64_t k, std::vector<std::vector<float>> & left) {
    BatchShape shape;
    shape.kind = GraphKind::DRAFT;
    shape.drafter = host_.index;
    const auto n = static_cast<int64_t>(step.tokens.size());
    shape.n_rows = shape.n_out = sizes_.draft_rows(n);
    const CellTable & table = kv_.cells();
    const bool has_masks = !kv_.groups().front().masks().empty();
    shape.n_kv = {sizes_.cells(table.high(), table.n_cells(), has_masks, recent_cells_)};
    select_top(shape, k);
    CachedGraph & cached = graph_of(shape);
    // Padding rows copy the last sequence's first row, so they write the same keys and values.
    const int64_t last = step.sequences.back().first;
    const auto padded = [&](auto values) {
        values.resize(shape.n_rows, values[last]);
        return values;
    };
    const std::vector<int32_t> tokens = padded(step.tokens), positions = padded(step.positions);
    const std::vector<int64_t> cells = padded(step.cells);
    cached.write<float>(cached.in.embd, [&](float * data) { embed(tokens, data); });
    cached.write_positions(cached.in.positions, positions);
    cached.write(cached.in.cells.front(), cells);
    write_hidden(cached, padded(step.hidden));
    kv_.groups().front().set_rows({positions, cells, step.sequences}, shape.n_kv.front());
    host_.graphs.compute(cached);
    const auto * rows = cached.values<float>(ggml_get_tensor(cached.ctx.get(), "left"));
    left.clear();
    for (int64_t i = 0; i < n; ++i) {
        left.emplace_back(rows + i * n_embd(), rows + (i + 1) * n_embd());
    }
    Draft draft = read_draft(cached, k, backend_);
    draft.best.resize(n * k);
    draft.log_sum_exp.resize(n);
    return draft;
}

Draft MtpModel::draft(const std::vector<DraftBlock> & blocks, int64_t k) {
    catch_up();
    int64_t n_steps = 0;
    std::vector<Feature> rows;
    std::vector<size_t> first_rows; // index of each block's first row among the rows of all drafts
    for (const DraftBlock & block : blocks) {
        slide_window(block.sequence, block.position);
        n_steps = std::max(n_steps, block.n_draft);
        first_rows.push_back(rows.size());
        for (int32_t i = 0; i < block.n_draft; ++i) {
            rows.push_back({block.sequence, -1, block.position + i, -1});
        }
    }
    Draft draft;
    draft.best.resize(rows.size() * k);
    draft.log_sum_exp.resize(rows.size());
    std::vector<int32_t> tokens;
    std::vector<std::vector<float>> hidden(blocks.size());
    for (const DraftBlock & block : blocks) {
        tokens.push_back(block.last_token);
    }
    const std::vector<int64_t> cells = take_cells(rows);
    try {
        for (int64_t i = 0; i < n_steps; ++i) {
            Step step;
            std::vector<size_t> drafting; // blocks that draft a token in this step
            for (size_t b = 0; b < blocks.size(); ++b) {
                const DraftBlock & block = blocks[b];
                if (i >= block.n_draft) {
                    continue;
                }
                const auto row = static_cast<int64_t>(drafting.size());
                drafting.push_back(b);
                step.sequences.push_back({block.sequence, row, 1, nullptr});
                step.tokens.push_back(tokens[b]);
                step.positions.push_back(block.position + static_cast<int32_t>(i));
                step.cells.push_back(cells[first_rows[b] + i]);
                step.hidden.push_back(i == 0 ? hidden_before(block.sequence, block.position)
                                             : hidden[b].data());
            }
            std::vector<std::vector<float>> left;
            const Draft found = run(step, k, left);
            for (size_t row = 0; row < drafting.size(); ++row) {
                const size_t b = drafting[row], at = first_rows[b] + i;
                const auto best = draft.best.begin() + at * k;
                std::copy_n(found.best.begin() + row * k, k, best);
                draft.log_sum_exp[at] = found.log_sum_exp[row];
                const Sampler * sampler = blocks[b].sampler;
                if (sampler != nullptr) { // the first candidate is the one that the draft follows
                    std::vector<Candidate> candidates(best, best + k);
                    for (Candidate & one : candidates) {
                        one.token = drafter_->token(one.token);
                    }
                    const int32_t token = sampler->predict(candidates, step.positions[row] + 1);
                    const auto is_it = [&](const Candidate & one) {
                        return drafter_->token(one.token) == token;
                    };
                    std::iter_swap(best, std::find_if(best, best + k, is_it));
                }
                tokens[b] = drafter_->token(best->token);
                hidden[b] = std::move(left[row]);
            }
        }
    } catch (...) {
        release(cells);
        throw;
    }
    release(cells); // drafted tokens' K/V are temporary: K/V of the target's features replace them
    return draft;
}

void MtpModel::truncate(int32_t sequence, int32_t position) {
    DraftModel::truncate(sequence, position);
    const auto last = last_.find(sequence);
    if (last != last_.end() && last->second.position >= position) {
        last_.erase(last);
    }
}

} // namespace

static std::unique_ptr<DraftModel> attach(const std::shared_ptr<const Drafter> & drafter,
                                          const DraftHost & host) {
    return std::make_unique<MtpModel>(drafter, host);
}

extern const DraftKind MTP = {"mtp", is_mtp, read, bind, attach};

} // namespace dfl
