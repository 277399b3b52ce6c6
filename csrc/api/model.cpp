// Functions of the C ABI for models and drafters.
#include "api/handles.h"

#include "gguf_schema.h"

#include <algorithm>
#include <sstream>

using dfl::copy_text;
using dfl::guard;
using dfl::need;

// Converts an option's word, words[i], to enumerator i; a NULL word stands for words[0].
template <typename Enum>
static Enum one_of(const char * field, const char * word, std::vector<std::string> words) {
    const auto found =
        word != nullptr ? std::find(words.begin(), words.end(), word) : words.begin();
    DFL_CHECK(found != words.end(), DFL_STATUS_ARGUMENT, "%s is \"%.32s\", expected %s, %s or %s",
              field, word, words[0].c_str(), words[1].c_str(), words[2].c_str());
    return static_cast<Enum>(found - words.begin());
}

static dfl::ModelParams model_params(const dfl_model_params * params) {
    dfl::ModelParams p;
    p.device = params->device != nullptr ? params->device : "";
    p.n_gpu_layers = params->n_gpu_layers;
    DFL_CHECK(params->n_cpu_moe >= 0, DFL_STATUS_ARGUMENT, "n_cpu_moe is %d, expected 0 or more",
              params->n_cpu_moe);
    p.n_cpu_experts = params->n_cpu_moe;
    p.drafter_on_cpu = params->draft_gpu_layers == 0;
    p.n_threads = params->n_threads;
    p.repack = params->repack != 0;
    DFL_CHECK(params->dry_run >= DFL_DRY_RUN_NONE && params->dry_run <= DFL_DRY_RUN_CUDA,
              DFL_STATUS_ARGUMENT, "dry_run is %d, expected 0 to 2", params->dry_run);
    p.draft.embedding_scale = one_of<dfl::DraftChoices::Scale>(
        "draft_embedding_scale", params->draft_embedding_scale, {"auto", "raw", "sqrt"});
    p.draft.attention = one_of<dfl::DraftChoices::Attention>(
        "draft_attention", params->draft_attention, {"auto", "causal", "bidirectional"});
    p.draft.tap_shift = params->draft_tap_shift;
    p.draft.is_unwindowed = params->draft_unwindowed != 0;
    DFL_CHECK(params->draft_vocab >= 0, DFL_STATUS_ARGUMENT,
              "draft_vocab is %d, expected 0 or more", params->draft_vocab);
    p.draft.vocab = params->draft_vocab;
    p.dry_run = static_cast<dfl_dry_run>(params->dry_run);
    std::stringstream names(params->excluded_buffer_types ? params->excluded_buffer_types : "");
    for (std::string name; std::getline(names, name, ',');) {
        p.excluded_buffer_types.push_back(name);
    }
    if (params->progress != nullptr) {
        p.progress = [=](uint64_t done, uint64_t total) {
            return params->progress(params->user, done, total) != 0;
        };
    }
    return p;
}

dfl_status dfl_model_load(const char * path, const dfl_model_params * params, dfl_model ** model,
                          dfl_error * err) {
    return guard(err, [&] {
        need(path, params, model);
        *model = new dfl_model{std::make_shared<const dfl::Model>(path, model_params(params))};
    });
}

void dfl_model_free(dfl_model * model) { delete model; }

dfl_status dfl_model_get_info(const dfl_model * model, dfl_model_info * info, dfl_error * err) {
    return guard(err, [&] {
        need(model, info);
        const dfl::Model & m = *model->model;
        const dfl::Hparams & hp = m.hparams();
        *info = {};
        copy_text(info->architecture, m.file().arch());
        copy_text(info->name, m.file().text(dfl::schema::KEY_GENERAL_NAME).value_or(""));
        copy_text(info->device, m.device_name());
        info->n_vocab = hp.n_vocab;
        info->n_embd = hp.n_embd;
        info->n_layer = hp.n_layer();
        info->n_recurrent = hp.n_recurrent();
        info->n_ctx_train = hp.n_ctx_train;
        info->mapped_bytes = m.weights().mapped_bytes;
        info->copied_bytes = m.weights().copied_bytes;
        info->cpu_split_bytes = m.weights().cpu_split_bytes;
        info->n_placements = static_cast<int32_t>(m.weights().placements.size());
        info->embedding_bytes = m.weights().embedding_bytes;
        info->n_expert = hp.experts.n_expert;
        info->n_expert_used = hp.experts.n_used;
        info->expert_bytes = m.weights().expert_bytes;
        info->cpu_expert_bytes = m.weights().cpu_expert_bytes;
        info->on_gpu = m.on_gpu();
        info->has_drafter = dfl::find_draft_kind(m.file()) != nullptr;
    });
}

static void copy_placement(const dfl::Weights & weights, int32_t index, dfl_placement * to) {
    const auto n = static_cast<int32_t>(weights.placements.size());
    DFL_CHECK(index >= 0 && index < n, DFL_STATUS_ARGUMENT,
              "placement %d is out of range, the weights have %d placements", index, n);
    *to = {};
    copy_text(to->kernels, weights.placements[index].kernels);
    to->bytes = weights.placements[index].bytes;
}

dfl_status dfl_model_get_placement(const dfl_model * model, int32_t index,
                                   dfl_placement * placement, dfl_error * err) {
    return guard(err, [&] {
        need(model, placement);
        copy_placement(model->model->weights(), index, placement);
    });
}

dfl_status dfl_drafter_load(const char * path, const dfl_model * target,
                            const dfl_model_params * params, dfl_drafter ** drafter,
                            dfl_error * err) {
    return guard(err, [&] {
        need(path, target, params, drafter);
        *drafter = new dfl_drafter{
            std::make_shared<const dfl::Drafter>(path, target->model, model_params(params))};
    });
}

void dfl_drafter_free(dfl_drafter * drafter) { delete drafter; }

dfl_status dfl_drafter_get_info(const dfl_drafter * drafter, dfl_drafter_info * info,
                                dfl_error * err) {
    return guard(err, [&] {
        need(drafter, info);
        const dfl::Drafter & d = *drafter->drafter;
        *info = {};
        copy_text(info->kind, d.kind().name);
        copy_text(info->architecture, d.file().arch());
        copy_text(info->name, d.file().text(dfl::schema::KEY_GENERAL_NAME).value_or(""));
        info->n_layer = d.hparams().n_layer();
        info->block_size = d.draft().block_size;
        info->mask_token = d.draft().mask_token;
        info->n_taps = static_cast<int32_t>(d.draft().taps.size());
        const std::vector<dfl::LayerShape> & layers = d.hparams().layers;
        info->n_causal = static_cast<int32_t>(std::count_if(
            layers.begin(), layers.end(), [](const dfl::LayerShape & x) { return x.causal; }));
        info->n_windowed = static_cast<int32_t>(std::count_if(
            layers.begin(), layers.end(), [](const dfl::LayerShape & x) { return x.window > 0; }));
        info->embedding_scale = d.hparams().embedding_scale;
        info->sqrt_scale = d.sqrt_scale();
        info->scale_is_open = d.scale_is_open();
        info->mapped_bytes = d.weights().mapped_bytes;
        info->copied_bytes = d.weights().copied_bytes;
        info->cpu_split_bytes = d.weights().cpu_split_bytes;
        info->n_placements = static_cast<int32_t>(d.weights().placements.size());
    });
}

dfl_status dfl_drafter_get_placement(const dfl_drafter * drafter, int32_t index,
                                     dfl_placement * placement, dfl_error * err) {
    return guard(err, [&] {
        need(drafter, placement);
        copy_placement(drafter->drafter->weights(), index, placement);
    });
}
