// The DFlash drafter: layers that attend to features of the target and to a block of mask tokens.
#include "dflash.h"
#include "arch/arch.h"
#include "draft/draft_model.h"
#include "error.h"
#include "gguf_schema.h"
#include "layers/attention.h"
#include "layers/cpu_ops/row_copies.h"
#include "layers/decoder.h"
#include "layers/linear.h"

#include <algorithm>
#include <cmath>
#include <optional>

namespace dfl {

static const char * const OLD_ARCHS[] = {schema::ARCH_OLD_DFLASH, schema::ARCH_OLD_QWEN35_DFLASH,
                                         schema::ARCH_OLD_GEMMA4_DFLASH};

// RMS norm epsilon of drafter files in old formats, whose metadata has none.
static constexpr double OLD_EPS = 1e-6;

static bool is_old(const GgufFile & file) {
    return std::any_of(std::begin(OLD_ARCHS), std::end(OLD_ARCHS),
                       [&](const char * name) { return file.arch() == name; });
}

static bool is_dflash(const GgufFile & file) {
    return file.arch() == schema::ARCH_DFLASH || is_old(file);
}

static void refuse_relatives(const GgufFile & file) {
    for (const char * marker : {schema::TENSOR_MARKOV_W1, schema::TENSOR_SELECTOR_HIDDEN}) {
        DFL_CHECK(file.tensor(marker) == nullptr, DFL_STATUS_UNSUPPORTED,
                  "%s: tensor %s makes it a %s drafter; only DFlash drafters can be run",
                  file.path().c_str(), marker,
                  marker == schema::TENSOR_MARKOV_W1 ? "DSpark" : "DFlash2");
    }
}

// Returns DFlash's default taps, as indices of layer inputs, for files that name no target layers.
static std::vector<int64_t> default_taps(int64_t n_taps, int64_t n_target_layers) {
    if (n_taps == 1) {
        return {n_target_layers / 2 + 1};
    }
    std::vector<int64_t> taps;
    for (int64_t i = 0; i < n_taps; ++i) {
        taps.push_back(std::llrint(1.0 + double(i) * (n_target_layers - 4) / (n_taps - 1)) + 1);
    }
    return taps;
}

static std::vector<int64_t> read_taps(const GgufFile & file, int64_t n_embd,
                                      int64_t n_target_layers) {
    std::vector<int64_t> taps;
    if (!is_old(file)) {
        const auto stored = file.integers(schema::KEY_TARGET_LAYERS);
        DFL_CHECK(stored, DFL_STATUS_FILE, "%s: metadata key %s is missing", file.path().c_str(),
                  file.key(schema::KEY_TARGET_LAYERS).c_str());
        taps = *stored;
    } else if (const auto ids = file.integers(schema::KEY_OLD_DFLASH_TARGET_LAYER_IDS)) {
        taps = *ids;
        std::for_each(taps.begin(), taps.end(), [](int64_t & id) { ++id; });
    } else {
        const int64_t n_features =
            file.integer(schema::KEY_OLD_DFLASH_N_TARGET_FEATURES).value_or(0);
        const int64_t n_taps =
            file.integer(schema::KEY_OLD_DFLASH_N_TARGET_LAYERS).value_or(n_features / n_embd);
        DFL_CHECK(n_taps >= 1 && n_taps <= n_target_layers, DFL_STATUS_FILE,
                  "%s: the drafter reads %lld target layers, the target has %lld",
                  file.path().c_str(), (long long)n_taps, (long long)n_target_layers);
        taps = default_taps(n_taps, n_target_layers);
    }
    DFL_CHECK(!taps.empty() && taps.size() <= 64, DFL_STATUS_FILE,
              "%s: the drafter reads %zu target layers, expected 1 to 64", file.path().c_str(),
              taps.size());
    for (const int64_t tap : taps) {
        DFL_CHECK(
            tap >= 0 && tap < n_target_layers, DFL_STATUS_FILE,
            "%s: the drafter reads the input of target layer %lld, the target has layers 0 to %lld",
            file.path().c_str(), (long long)tap, (long long)n_target_layers - 1);
    }
    return taps;
}

// Sets the causal layers: all or none by the file's key; without the key, layers with a window.
// Source: the reference package dflash 0.1.0, Qwen3DFlashAttention.
static void read_causality(const GgufFile & file, Hparams & hp) {
    const auto causal = file.boolean(schema::KEY_ATTENTION_CAUSAL);
    for (LayerShape & layer : hp.layers) {
        layer.causal = causal.value_or(layer.window > 0);
    }
}

static Activation read_activation(const GgufFile & file) {
    const std::string name = file.text(schema::KEY_HIDDEN_ACTIVATION).value_or("silu");
    const bool gelu = name == "gelu" || name == "gelu_pytorch_tanh";
    DFL_CHECK(gelu || name == "silu", DFL_STATUS_UNSUPPORTED,
              "%s: activation \"%.32s\" is not known; supported: silu, gelu, gelu_pytorch_tanh",
              file.path().c_str(), name.c_str());
    return gelu ? Activation::GELU : Activation::SILU;
}

static DraftHparams read(const GgufFile & file, const Model & target) {
    refuse_relatives(file);
    DraftHparams draft;
    const auto sections = file.integers(schema::KEY_ROPE_DIMENSION_SECTIONS);
    const bool multi =
        sections && sections->size() == 4 &&
        std::any_of(sections->begin(), sections->end(), [](int64_t n) { return n != 0; });
    const bool old = is_old(file);
    DFL_CHECK(!old || file.has(schema::KEY_ROPE_FREQ_BASE), DFL_STATUS_FILE,
              "%s: metadata key %s is missing", file.path().c_str(),
              file.key(schema::KEY_ROPE_FREQ_BASE).c_str());
    HparamRules rules;
    rules.rope_type = multi ? GGML_ROPE_TYPE_MROPE : GGML_ROPE_TYPE_NEOX;
    rules.default_eps = old ? std::optional(OLD_EPS) : std::nullopt;
    rules.sliding_period = 0;
    draft.hp = read_common_hparams(file, rules);
    read_scales(file, draft.hp);
    read_causality(file, draft.hp);
    const Activation activation = read_activation(file);
    for (LayerShape & layer : draft.hp.layers) {
        layer.activation = activation;
        layer.value_is_key = true;
        layer.rope.takes_factors = !multi;
    }
    if (multi) {
        read_rope_sections(file, draft.hp);
    }

    draft.taps = read_taps(file, draft.hp.n_embd, target.hparams().n_layer());
    const char * block_key = old ? schema::KEY_OLD_DFLASH_BLOCK_SIZE : schema::KEY_BLOCK_SIZE;
    draft.block_size = file.integer(block_key).value_or(16);
    DFL_CHECK(draft.block_size >= 2 && draft.block_size <= 1024, DFL_STATUS_FILE,
              "%s: metadata key %s is %lld, expected 2 to 1024", file.path().c_str(),
              file.key(block_key).c_str(), (long long)draft.block_size);
    const char * mask_key =
        old ? schema::KEY_OLD_DFLASH_MASK_TOKEN_ID : schema::KEY_TOKENIZER_MASK_ID;
    draft.mask_token = static_cast<int32_t>(file.need_integer(mask_key, 0, INT32_MAX));
    return draft;
}

// Returns the first of `names` that is a tensor of layer il in the file.
static const char * spelled(const WeightLoader & loader, std::initializer_list<const char *> names,
                            int il) {
    for (const char * name : names) {
        if (loader.has(name, il)) {
            return name;
        }
    }
    return *names.begin();
}

static void bind(WeightLoader & loader, const DraftHparams & draft) {
    const Hparams & hp = draft.hp;
    Weights & w = loader.weights();
    w.fusion = loader.linear(spelled(loader,
                                     {schema::TENSOR_FC, schema::TENSOR_OLD_DFLASH_FC,
                                      schema::TENSOR_OLD_DFLASH_FC_FLAT},
                                     0),
                             0, hp.n_embd * static_cast<int64_t>(draft.taps.size()), hp.n_embd);
    w.fusion_norm = loader.vector(
        spelled(loader,
                {schema::TENSOR_ENC_OUTPUT_NORM, schema::TENSOR_OLD_DFLASH_HIDDEN_NORM,
                 schema::TENSOR_OLD_DFLASH_HIDDEN_NORM_FLAT},
                0),
        0, hp.n_embd);
    w.output_norm = loader.vector(schema::TENSOR_OUTPUT_NORM, 0, hp.n_embd);
    loader.rope_factors();
    if (loader.has(schema::TENSOR_TOKEN_EMBD, 0)) {
        loader.token_embeddings(schema::TENSOR_TOKEN_EMBD);
    }
    loader.drafter_head();
    for (int il = 0; il < hp.n_layer(); ++il) {
        const bool has_ffn_norm = loader.has(schema::TENSOR_FFN_NORM, il);
        BlockOptions options;
        options.head_norms = true;
        options.sinks = loader.has(schema::TENSOR_ATTN_SINKS, il);
        // Older files give the norm before the feed-forward the name of the norm after attention.
        options.ffn_norm = has_ffn_norm ? nullptr : schema::TENSOR_POST_ATTENTION_NORM;
        options.post_attn_norm = has_ffn_norm && loader.has(schema::TENSOR_POST_ATTENTION_NORM, il);
        options.post_ffn_norm = loader.has(schema::TENSOR_POST_FFW_NORM, il);
        options.output_scale = loader.has(schema::TENSOR_LAYER_OUTPUT_SCALE, il);
        bind_transformer_block(loader, il, options);
    }
}

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

// Returns the graph that computes n features' K/V in all layers, without the layers' input norms.
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
    std::map<int32_t, int32_t> ends; // last position with a feature + 1, by sequence
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
        // Pad with rows of zeros that go to the reserved cell, which follows the usable ones.
        const int64_t n = cached.shape.n_rows;
        std::vector<int32_t> positions(n, 0), rows(n, static_cast<int32_t>(host_.ring.zero_row()));
        for (size_t i = 0; i < pending_.size(); ++i) {
            positions[i] = pending_[i].position;
            rows[i] = static_cast<int32_t>(pending_[i].row);
        }
        std::vector<int64_t> to = cells;
        to.resize(n, kv_.cells().size());
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
            if (i > 0) { // the row of a mask token predicts that token itself, not the next
                drafted.push_back(static_cast<int32_t>(first + i));
            }
        }
    }
    // Padding rows copy the last block's first row, so they write the same keys and values.
    const int64_t last = sequences.back().first;
    tokens.resize(cached.shape.n_rows, tokens[last]);
    positions.resize(cached.shape.n_rows, positions[last]);
    to.resize(cached.shape.n_rows, to[last]);
    drafted.resize(cached.shape.n_out, static_cast<int32_t>(last));
    cached.write<float>(cached.in.embd, [&](float * data) { embed(tokens, data); });
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
    // n_kv includes the masked padding cell: CUDA's flash attention prefers multiples of 256 cells.
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
    release(cells); // drafted tokens' K/V are temporary: K/V of the target's features replace them
    draft.best.resize(n_drafted * k); // drops the candidates of padding rows
    draft.log_sum_exp.resize(n_drafted);
    return draft;
}

} // namespace

static std::unique_ptr<DraftModel> attach(const std::shared_ptr<const Drafter> & drafter,
                                          const DraftHost & host) {
    return std::make_unique<DFlashModel>(drafter, host);
}

extern const DraftKind DFLASH = {"dflash", is_dflash, read, bind, attach};

} // namespace dfl
