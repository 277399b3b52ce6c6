// Functions of the C ABI for engines.
#include "api/handles.h"

#include "model/quantize.h"

#include <algorithm>

using dfl::copy_text;
using dfl::guard;
using dfl::guard_busy;
using dfl::need;

dfl_status dfl_engine_create(const dfl_model * model, const dfl_engine_params * params,
                             dfl_engine ** engine, dfl_error * err) {
    return guard(err, [&] {
        need(model, params, engine);
        need(params->cache_type_k, params->cache_type_v);
        dfl::EngineParams p;
        p.n_ctx = params->n_ctx;
        p.n_parallel = params->n_parallel;
        p.n_ubatch = params->n_ubatch;
        p.n_threads = params->n_threads;
        p.type_k = dfl::type_from_name(params->cache_type_k);
        p.type_v = dfl::type_from_name(params->cache_type_v);
        for (int32_t i = 0; i < params->n_drafters; ++i) {
            need(params->drafters, params->drafters[i]);
            p.drafters.push_back(params->drafters[i]->drafter);
            p.draft_window = params->draft_window;
        }
        for (int32_t i = 0; i < params->n_taps; ++i) {
            need(params->taps);
            p.taps.push_back(params->taps[i]);
        }
        *engine = new dfl_engine{std::make_shared<dfl::Engine>(model->model, p),
                                 std::make_shared<std::atomic<bool>>(false)};
    });
}

void dfl_engine_free(dfl_engine * engine) { delete engine; }

dfl_status dfl_engine_get_info(const dfl_engine * engine, dfl_engine_info * info, dfl_error * err) {
    return guard(err, [&] {
        need(engine, info);
        dfl::Engine & e = *engine->engine;
        *info = {};
        info->n_ctx = e.n_ctx();
        info->n_parallel = e.n_parallel();
        info->n_threads = e.n_threads();
        info->n_memory = static_cast<int32_t>(e.memory().size());
        info->cell_bytes = e.kv().groups().front().row_bytes();
        info->partial_prefix_ok = e.partial_prefix_ok();
        info->n_graphs_built = e.n_graphs_built();
        info->n_graph_nodes = e.n_graph_nodes();
        info->n_passes = e.n_passes();
        info->bytes_read = e.bytes_read();
        info->submit_ns = e.submit_ns();
        info->wait_ns = e.wait_ns();
        copy_text(info->largest_graph, e.largest_graph());
        std::string names;
        for (const std::string & name : e.cpu_operations()) {
            names += (names.empty() ? "" : ",") + name;
        }
        copy_text(info->cpu_operations, names);
    });
}

dfl_status dfl_engine_get_memory(const dfl_engine * engine, int32_t index, dfl_memory * memory,
                                 dfl_error * err) {
    return guard(err, [&] {
        need(engine, memory);
        const std::vector<dfl::MemoryUse> uses = engine->engine->memory();
        const auto n = static_cast<int32_t>(uses.size());
        DFL_CHECK(index >= 0 && index < n, DFL_STATUS_ARGUMENT,
                  "memory record %d is out of range, the engine has %d records", index, n);
        *memory = {};
        copy_text(memory->name, uses[index].name);
        copy_text(memory->place, uses[index].place);
        memory->bytes = uses[index].bytes;
    });
}

dfl_status dfl_engine_set_top_k(dfl_engine * engine, int32_t k, int32_t * active, dfl_error * err) {
    return guard_busy(engine, err, [&] {
        need(active);
        *active = engine->engine->set_top_k(k) ? k : 0;
    });
}

dfl_status dfl_engine_reserve_verify(dfl_engine * engine, int64_t n, dfl_error * err) {
    return guard_busy(engine, err, [&] { engine->engine->reserve_verify(n); });
}

int64_t dfl_engine_n_free_cells(const dfl_engine * engine) {
    return engine != nullptr ? engine->engine->kv().cells().n_unclaimed() : -1;
}

int64_t dfl_engine_prefix_bytes(const dfl_engine * engine) {
    return engine != nullptr ? static_cast<int64_t>(engine->engine->prefix_bytes()) : -1;
}

int64_t dfl_engine_verify_rows(const dfl_engine * engine) {
    return engine != nullptr ? engine->engine->verify_rows() : -1;
}

dfl_status dfl_engine_run(dfl_engine * engine, dfl_batch_entry * entries, int64_t n_entries,
                          dfl_progress progress, void * user, dfl_error * err) {
    return guard_busy(engine, err, [&] {
        need(entries);
        std::vector<dfl::BatchEntry> parsed;
        for (int64_t i = 0; i < n_entries; ++i) {
            const dfl_batch_entry & entry = entries[i];
            need(entry.sequence, entry.tokens);
            parsed.push_back({&entry.sequence->sequence, entry.is_verify != 0, entry.tokens,
                              entry.n, entry.parents, entry.n_remaining, entry.all_logits,
                              entry.all_features});
        }
        dfl::PrefillProgress watch;
        if (progress != nullptr) {
            watch = [=](int64_t done, int64_t total) { return progress(user, done, total) != 0; };
        }
        engine->engine->run(parsed, watch);
        for (int64_t i = 0; i < n_entries; ++i) {
            entries[i].first_row = entries[i].sequence->sequence.first_row();
        }
    });
}

dfl_status dfl_engine_draft(dfl_engine * engine, int32_t drafter,
                            const dfl_draft_request * requests, int64_t n_requests, int64_t k,
                            int32_t * tokens, float * logits, float * log_sum_exp,
                            dfl_error * err) {
    return guard_busy(engine, err, [&] {
        need(requests, tokens, logits, log_sum_exp);
        std::vector<dfl::DraftRequest> parsed;
        for (int64_t i = 0; i < n_requests; ++i) {
            need(requests[i].sequence);
            const dfl_sampler * sampler = requests[i].sampler;
            parsed.push_back({&requests[i].sequence->sequence, requests[i].last_token,
                              requests[i].n_draft,
                              sampler != nullptr ? &sampler->sampler : nullptr});
        }
        const dfl::Draft draft = engine->engine->draft(drafter, parsed, k);
        for (const dfl::Candidate & candidate : draft.best) {
            *tokens++ = candidate.token;
            *logits++ = candidate.logit;
        }
        std::copy(draft.log_sum_exp.begin(), draft.log_sum_exp.end(), log_sum_exp);
    });
}

dfl_status dfl_engine_set_draft_scale(dfl_engine * engine, int32_t drafter, float scale,
                                      dfl_error * err) {
    return guard_busy(engine, err,
                      [&] { engine->engine->drafter_at(drafter).set_embedding_scale(scale); });
}

dfl_status dfl_engine_commit(dfl_engine * engine, const dfl_path * paths, int64_t n_paths,
                             dfl_error * err) {
    return guard_busy(engine, err, [&] {
        need(paths);
        std::vector<dfl::Path> parsed;
        for (int64_t i = 0; i < n_paths; ++i) {
            need(paths[i].sequence);
            parsed.push_back({&paths[i].sequence->sequence, paths[i].nodes, paths[i].n});
        }
        engine->engine->commit(parsed);
    });
}
