#include "draft/drafter.h"

#include "error.h"
#include "gguf_schema.h"

#include <cmath>

namespace dfl {

// Throws if tokens or merges of drafter and target differ. Special ids may: a published pair's do.
static void check_tokenizers(const GgufFile & drafter, const GgufFile & target) {
    for (const char * key : {schema::KEY_TOKENIZER_TOKENS, schema::KEY_TOKENIZER_MERGES}) {
        if (!drafter.has(key) || !target.has(key)) {
            continue; // older drafter files have no tokenizer
        }
        const int64_t differs = drafter.first_difference(target, key);
        DFL_CHECK(differs < 0, DFL_STATUS_FILE,
                  "%s: its %s differs from that of the target %s at entry %lld",
                  drafter.path().c_str(), key, target.path().c_str(), (long long)differs);
    }
}

const DraftKind * find_draft_kind(const GgufFile & file) {
    const std::vector<const DraftKind *> & kinds = draft_kinds();
    const auto kind = std::find_if(kinds.begin(), kinds.end(),
                                   [&](const DraftKind * kind) { return kind->reads(file); });
    return kind != kinds.end() ? *kind : nullptr;
}

static const DraftKind & kind_of(const GgufFile & file) {
    const DraftKind * kind = find_draft_kind(file);
    DFL_CHECK(
        kind != nullptr, DFL_STATUS_UNSUPPORTED,
        "%s: architecture \"%s\" is not that of a drafter (dflash or ngram), and the file does "
        "not have one MTP layer",
        file.path().c_str(), file.arch().c_str());
    return *kind;
}

void Drafter::choose(const DraftChoices & choices, const Hparams & target) {
    Hparams & hp = draft_.hp;
    sqrt_scale_ = target.embedding_scale != 1.0f ? target.embedding_scale
                                                 : std::sqrt(static_cast<float>(hp.n_embd));
    scale_is_open_ = target.embedding_scale != 1.0f && !file_.has(schema::KEY_EMBEDDING_SCALE) &&
                     choices.embedding_scale == DraftChoices::Scale::AUTO;
    if (choices.embedding_scale != DraftChoices::Scale::AUTO) {
        const bool is_raw = choices.embedding_scale == DraftChoices::Scale::RAW;
        hp.embedding_scale = is_raw ? 1.0f : sqrt_scale_;
    }
    draft_.n_head_tokens = choices.vocab < hp.n_vocab ? choices.vocab : 0;
    for (LayerShape & layer : hp.layers) {
        if (choices.attention != DraftChoices::Attention::AUTO) {
            layer.causal = choices.attention == DraftChoices::Attention::CAUSAL;
        }
        layer.window = choices.is_unwindowed ? 0 : layer.window;
    }
    for (int64_t & tap : draft_.taps) {
        tap += choices.tap_shift;
        DFL_CHECK(
            choices.tap_shift == 0 || (tap >= 0 && tap <= target.n_layer()), DFL_STATUS_FILE,
            "%s: draft_tap_shift is %lld, which moves a tap to the input of target layer %lld; "
            "the target has layers 0 to %lld",
            file_.path().c_str(), (long long)choices.tap_shift, (long long)tap,
            (long long)target.n_layer() - 1);
    }
}

Drafter::Drafter(const std::string & path, const std::shared_ptr<const Model> & model,
                 const ModelParams & params)
    : file_(path), kind_(kind_of(file_)), target_(model) {
    const Model & target = *model;
    const Hparams & hp = target.hparams();
    draft_ = kind_.read(file_, target);
    check_no_key_skipped(file_);
    draft_.hp.n_vocab = hp.n_vocab;
    choose(params.draft, hp);
    DFL_CHECK(draft_.hp.n_embd == hp.n_embd, DFL_STATUS_FILE,
              "%s: its hidden size is %lld, that of the target %s is %lld", path.c_str(),
              (long long)draft_.hp.n_embd, target.file().path().c_str(), (long long)hp.n_embd);
    DFL_CHECK(draft_.mask_token < hp.n_vocab, DFL_STATUS_FILE,
              "%s: its mask token %d is outside the target's vocabulary of %lld", path.c_str(),
              draft_.mask_token, (long long)hp.n_vocab);
    check_tokenizers(file_, target.file());

    is_on_cpu_ = params.drafter_on_cpu && target.on_gpu();
    const Split split = {is_on_cpu_ ? Split::ALL : 0, 0};
    Devices devices(target.device(), split, params.n_threads, params.excluded_buffer_types,
                    target.dry_run(), params.repack);
    WeightLoader loader(file_, draft_.hp, devices, draft_.first_block);
    kind_.bind(loader, draft_);
    weights_ = loader.load(params.progress);
}

const Linear & Drafter::head(const Model & target) const {
    return weights_->output ? weights_->output : target.weights().output;
}

int32_t Drafter::token(int64_t row) const {
    return static_cast<int32_t>(weights_->head_tokens.empty() ? row : weights_->head_tokens[row]);
}

void Drafter::embed(const Model & target, float scale, const int32_t * tokens, int64_t n,
                    float * dst) const {
    const Weights & w = weights_->token_embd != nullptr ? *weights_ : target.weights();
    embed_rows(w, draft_.hp.n_embd, scale, tokens, n, dst);
}

} // namespace dfl
