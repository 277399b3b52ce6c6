// extern "C" bodies only: check arguments, call in, guard().
#include "dflash.h"

#include "backend.h"
#include "error.h"
#include "gguf_schema.h"
#include "quantize.h"
#include "session.h"

#include <algorithm>
#include <ggml.h>
#include <sstream>

using dfl::guard;

struct dfl_model {
    std::shared_ptr<const dfl::Model> model;
};
struct dfl_drafter {
    std::shared_ptr<const dfl::Drafter> drafter;
};
struct dfl_session {
    dfl::Session session;
};
struct dfl_checkpoint {
    dfl::Checkpoint checkpoint;
};

template <typename... Pointers>
static void need(const Pointers *... pointers) {
    const bool all = ((pointers != nullptr) && ...);
    DFL_CHECK(all, DFL_STATUS_ARGUMENT, "a required pointer is NULL");
}

template <size_t N>
static void copy_text(char (&to)[N], const std::string & from) {
    std::snprintf(to, N, "%s", from.c_str());
}

int32_t dfl_abi_version(void) { return DFL_ABI_VERSION; }

const char * dfl_ggml_version(void) { return ggml_version(); }

const char * dfl_ggml_build_version(void) { return dfl::ggml_build_version(); }

dfl_status dfl_backend_load(const char * path, dfl_error * err) {
    return guard(err, [&] {
        DFL_CHECK(path != nullptr, DFL_STATUS_ARGUMENT, "path of the backend module is NULL");
        dfl::load_backend_module(path);
    });
}

int32_t dfl_device_count(void) { return dfl::device_count(); }

dfl_status dfl_device_get(int32_t index, dfl_device_info * info, dfl_error * err) {
    return guard(err, [&] {
        DFL_CHECK(info != nullptr, DFL_STATUS_ARGUMENT, "info is NULL");
        *info = dfl::device_info(index);
    });
}

dfl_status dfl_extra_buffer_types(char * names, uint64_t size, dfl_error * err) {
    return guard(err, [&] {
        need(names);
        std::string joined;
        for (const std::string & name : dfl::extra_buffer_types()) {
            joined += (joined.empty() ? "" : ",") + name;
        }
        DFL_CHECK(joined.size() < size, DFL_STATUS_ARGUMENT, "%zu names need more than %llu bytes",
                  joined.size(), (unsigned long long)size);
        std::snprintf(names, size, "%s", joined.c_str());
    });
}

dfl_status dfl_probe_buffer_type(const char * name, dfl_error * err) {
    return guard(err, [&] {
        need(name);
        dfl::probe_buffer_type(name);
    });
}

static dfl::ModelParams model_params(const dfl_model_params * params) {
    dfl::ModelParams p;
    p.device = params->device != nullptr ? params->device : "";
    p.n_gpu_layers = params->n_gpu_layers;
    p.n_threads = params->n_threads;
    p.repack = params->repack != 0;
    DFL_CHECK(params->measure >= DFL_MEASURE_NOTHING && params->measure <= DFL_MEASURE_CARD,
              DFL_STATUS_ARGUMENT, "measure is %d, expected 0 to 2", params->measure);
    p.measure = static_cast<dfl_measure>(params->measure);
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
        info->n_placements = static_cast<int32_t>(m.weights().placements.size());
        info->embedding_bytes = m.weights().embedding_bytes;
        info->on_gpu = m.on_gpu();
    });
}

static void copy_placement(const dfl::Weights & weights, int32_t index, dfl_placement * to) {
    const auto n = static_cast<int32_t>(weights.placements.size());
    DFL_CHECK(index >= 0 && index < n, DFL_STATUS_ARGUMENT,
              "placement %d: the weights have %d placements", index, n);
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
        copy_text(info->architecture, d.file().arch());
        copy_text(info->name, d.file().text(dfl::schema::KEY_GENERAL_NAME).value_or(""));
        info->n_layer = d.hparams().n_layer();
        info->block_size = d.draft().block_size;
        info->mask_token = d.draft().mask_token;
        info->n_taps = static_cast<int32_t>(d.draft().target_layers.size());
        info->mapped_bytes = d.weights().mapped_bytes;
        info->copied_bytes = d.weights().copied_bytes;
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

dfl_status dfl_session_create(const dfl_model * model, const dfl_session_params * params,
                              dfl_session ** session, dfl_error * err) {
    return guard(err, [&] {
        need(model, params, session);
        need(params->cache_type_k, params->cache_type_v);
        dfl::SessionParams p;
        p.n_ctx = params->n_ctx;
        p.n_ubatch = params->n_ubatch;
        p.n_threads = params->n_threads;
        p.type_k = dfl::type_from_name(params->cache_type_k);
        p.type_v = dfl::type_from_name(params->cache_type_v);
        if (params->drafter != nullptr) {
            p.drafter = params->drafter->drafter;
            p.draft_window = params->draft_window;
        }
        *session = new dfl_session{dfl::Session(model->model, p)};
    });
}

void dfl_session_free(dfl_session * session) { delete session; }

dfl_status dfl_session_get_info(const dfl_session * session, dfl_session_info * info,
                                dfl_error * err) {
    return guard(err, [&] {
        need(session, info);
        const dfl::Session & s = session->session;
        *info = {s.n_ctx(),
                 s.position(),
                 s.n_threads(),
                 s.n_graphs_built(),
                 s.kv_bytes(),
                 s.recurrent_bytes(),
                 s.arena_bytes(),
                 s.draft_bytes(),
                 s.trace_bytes(),
                 s.verify_rows(),
                 s.arena_bytes(dfl::GraphKind::APPEND),
                 s.arena_bytes(dfl::GraphKind::VERIFY),
                 s.arena_bytes(dfl::GraphKind::DRAFT),
                 s.pool_bytes(),
                 s.n_passes(),
                 s.bytes_read(),
                 s.submit_ns(),
                 s.wait_ns()};
    });
}

// A session that has memory to run in.
template <typename Handle>
static auto & running(Handle * session) {
    DFL_CHECK(session->session.model().measure() == DFL_MEASURE_NOTHING, DFL_STATUS_ARGUMENT,
              "the session was only measured: it has no memory to run in");
    return session->session;
}

dfl_status dfl_session_prefill(dfl_session * session, const int32_t * tokens, int64_t n,
                               float * all_logits, dfl_progress progress, void * user,
                               dfl_error * err) {
    return guard(err, [&] {
        need(session, tokens);
        dfl::PrefillProgress watch;
        if (progress != nullptr) {
            watch = [=](int64_t done, int64_t total) { return progress(user, done, total) != 0; };
        }
        running(session).prefill(tokens, n, all_logits, watch);
    });
}

dfl_status dfl_session_argmax(const dfl_session * session, int64_t row, int32_t * token,
                              dfl_error * err) {
    return guard(err, [&] {
        need(session, token);
        *token = running(session).argmax(row);
    });
}

dfl_status dfl_session_logits(const dfl_session * session, int64_t row, float * logits,
                              dfl_error * err) {
    return guard(err, [&] {
        need(session, logits);
        running(session).logits(row, logits);
    });
}

dfl_status dfl_session_draft(dfl_session * session, int32_t last_token, int64_t n_draft, int64_t k,
                             int32_t * tokens, float * logits, float * log_sum_exp,
                             dfl_error * err) {
    return guard(err, [&] {
        need(session, tokens);
        const dfl::Draft draft =
            running(session).draft(last_token, n_draft, k, log_sum_exp != nullptr);
        for (size_t i = 0; i < draft.best.size(); ++i) {
            tokens[i] = draft.best[i].token;
            if (logits != nullptr) {
                logits[i] = draft.best[i].logit;
            }
        }
        std::copy(draft.log_sum_exp.begin(), draft.log_sum_exp.end(), log_sum_exp);
    });
}

dfl_status dfl_session_reserve_verify(dfl_session * session, int64_t n, dfl_error * err) {
    return guard(err, [&] {
        need(session);
        session->session.reserve_verify(n);
    });
}

dfl_status dfl_session_verify(dfl_session * session, const int32_t * tokens, int64_t n,
                              dfl_error * err) {
    return guard(err, [&] {
        need(session, tokens);
        running(session).verify(tokens, nullptr, n);
    });
}

dfl_status dfl_session_verify_tree(dfl_session * session, const int32_t * tokens,
                                   const int32_t * parents, int64_t n, dfl_error * err) {
    return guard(err, [&] {
        need(session, tokens, parents);
        running(session).verify(tokens, parents, n);
    });
}

dfl_status dfl_session_commit(dfl_session * session, int64_t n, dfl_error * err) {
    return guard(err, [&] {
        need(session);
        running(session).commit(n);
    });
}

dfl_status dfl_session_commit_path(dfl_session * session, const int32_t * nodes, int64_t n,
                                   dfl_error * err) {
    return guard(err, [&] {
        need(session, nodes);
        running(session).commit_path(nodes, n);
    });
}

dfl_status dfl_session_reset(dfl_session * session, dfl_error * err) {
    return guard(err, [&] {
        need(session);
        running(session).reset();
    });
}

dfl_status dfl_session_truncate(dfl_session * session, int64_t position, dfl_error * err) {
    return guard(err, [&] {
        need(session);
        running(session).truncate(position);
    });
}

dfl_status dfl_checkpoint_take(const dfl_session * session, dfl_checkpoint ** checkpoint,
                               dfl_error * err) {
    return guard(err, [&] {
        need(session, checkpoint);
        *checkpoint = new dfl_checkpoint{running(session).take()};
    });
}

dfl_status dfl_checkpoint_restore(dfl_session * session, const dfl_checkpoint * checkpoint,
                                  dfl_error * err) {
    return guard(err, [&] {
        need(session, checkpoint);
        running(session).restore(checkpoint->checkpoint);
    });
}

int32_t dfl_checkpoint_is_valid(const dfl_session * session, const dfl_checkpoint * checkpoint) {
    return session != nullptr && checkpoint != nullptr &&
           session->session.holds(checkpoint->checkpoint);
}

int64_t dfl_checkpoint_position(const dfl_checkpoint * checkpoint) {
    return checkpoint != nullptr ? static_cast<int64_t>(checkpoint->checkpoint.tokens.size()) : -1;
}

void dfl_checkpoint_free(dfl_checkpoint * checkpoint) { delete checkpoint; }

dfl_status dfl_quantize_row_size(const char * type, int64_t n_per_row, uint64_t * size,
                                 dfl_error * err) {
    return guard(err, [&] {
        DFL_CHECK(type != nullptr && size != nullptr, DFL_STATUS_ARGUMENT, "type or size is NULL");
        *size = dfl::quantized_row_size(type, n_per_row);
    });
}

dfl_status dfl_quantize(const char * type, const float * src, int64_t n_rows, int64_t n_per_row,
                        void * dst, uint64_t dst_size, int32_t n_threads, dfl_error * err) {
    return guard(err, [&] {
        DFL_CHECK(type != nullptr && src != nullptr && dst != nullptr, DFL_STATUS_ARGUMENT,
                  "type, src or dst is NULL");
        dfl::quantize(type, src, n_rows, n_per_row, dst, dst_size, n_threads);
    });
}
