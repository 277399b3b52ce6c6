// DFlash drafters as files have them: metadata and tensors.
#include "draft/dflash_model.h"

#include "arch/arch.h"
#include "error.h"
#include "gguf_schema.h"

#include <algorithm>
#include <cmath>
#include <optional>

namespace dfl {

static const char * const OLD_ARCHS[] = {schema::ARCH_OLD_DFLASH, schema::ARCH_OLD_QWEN35_DFLASH,
                                         schema::ARCH_OLD_GEMMA4_DFLASH};

// Epsilon of files that do not name one.
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

// The reference's choice where a checkpoint names no layers, as layer inputs.
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
                  "%s: %lld tapped layers are given for a target of %lld", file.path().c_str(),
                  (long long)n_taps, (long long)n_target_layers);
        taps = default_taps(n_taps, n_target_layers);
    }
    DFL_CHECK(!taps.empty() && taps.size() <= 64, DFL_STATUS_FILE,
              "%s: %zu tapped layers, expected 1 to 64", file.path().c_str(), taps.size());
    for (const int64_t tap : taps) {
        DFL_CHECK(tap >= 0 && tap < n_target_layers, DFL_STATUS_FILE,
                  "%s: it taps the input of target layer %lld, the target has layers 0 to %lld",
                  file.path().c_str(), (long long)tap, (long long)n_target_layers - 1);
    }
    return taps;
}

// Reads which layers are causal: a key in the file holds for all; without it sliding
// layers are causal and full layers are not.
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

static DraftHparams read(const GgufFile & file, int64_t n_target_layers) {
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
        layer.rope.takes_factors = !multi; // as llama.cpp
    }
    if (multi) {
        read_rope_sections(file, draft.hp);
    }

    draft.taps = read_taps(file, draft.hp.n_embd, n_target_layers);
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

// The first of several names that the file has.
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
        loader.token_embeddings();
    }
    loader.drafter_head();
    for (int il = 0; il < hp.n_layer(); ++il) {
        const bool has_ffn_norm = loader.has(schema::TENSOR_FFN_NORM, il);
        BlockOptions options;
        options.head_norms = true;
        options.sinks = loader.has(schema::TENSOR_ATTN_SINKS, il);
        // Older files keep the norm before the feed-forward under the name of the one after
        // attention.
        options.ffn_norm = has_ffn_norm ? nullptr : schema::TENSOR_POST_ATTENTION_NORM;
        options.post_attn_norm = has_ffn_norm && loader.has(schema::TENSOR_POST_ATTENTION_NORM, il);
        options.post_ffn_norm = loader.has(schema::TENSOR_POST_FFW_NORM, il);
        options.output_scale = loader.has(schema::TENSOR_LAYER_OUTPUT_SCALE, il);
        bind_transformer_block(loader, il, options);
    }
}

extern const DraftKind DFLASH = {is_dflash, read, bind, attach_dflash};

} // namespace dfl
