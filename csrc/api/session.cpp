// extern "C" bodies only: sessions and checkpoints.
#include "api/handles.h"

#include "model/quantize.h"

#include <algorithm>

using dfl::copy_text;
using dfl::guard;
using dfl::need;

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
        const dfl::ArenaBytes arena = s.arena_bytes();
        *info = {};
        info->n_ctx = s.n_ctx();
        info->position = s.position();
        info->n_threads = s.n_threads();
        info->n_graphs_built = s.n_graphs_built();
        info->kv_bytes = s.kv_bytes();
        info->recurrent_bytes = s.recurrent_bytes();
        info->arena_bytes = arena.main + arena.beside;
        info->draft_bytes = s.draft_bytes();
        info->trace_bytes = s.trace_bytes();
        info->verify_rows = s.verify_rows();
        info->prefill_arena_bytes = s.arena_bytes(dfl::GraphKind::APPEND);
        info->verify_arena_bytes = s.arena_bytes(dfl::GraphKind::VERIFY);
        info->draft_arena_bytes = s.arena_bytes(dfl::GraphKind::DRAFT);
        info->pool_bytes = s.pool_bytes();
        info->n_passes = s.n_passes();
        info->bytes_read = s.bytes_read();
        info->submit_ns = s.submit_ns();
        info->wait_ns = s.wait_ns();
        info->kv_beside_bytes = s.kv_beside_bytes();
        info->recurrent_beside_bytes = s.recurrent_beside_bytes();
        info->trace_beside_bytes = s.trace_beside_bytes();
        info->arena_beside_bytes = arena.beside;
        info->mask_bytes = s.mask_bytes();
        info->mask_beside_bytes = s.mask_beside_bytes();
        info->mask_bytes_written = s.mask_bytes_written();
        std::string names;
        for (const std::string & name : s.cpu_operations()) {
            names += (names.empty() ? "" : ",") + name;
        }
        copy_text(info->cpu_operations, names);
    });
}

namespace {

// One call of a session. A pass calls back, and no other call may change what it works on.
class Turn {
  public:
    explicit Turn(dfl_session * session) : session_(*session) {
        DFL_CHECK(!session_.is_busy.exchange(true), DFL_STATUS_ARGUMENT,
                  "the session is busy: an earlier call of it has not returned");
    }
    Turn(const Turn &) = delete;
    Turn & operator=(const Turn &) = delete;
    ~Turn() { session_.is_busy = false; }
    dfl::Session * operator->() const { return &session_.session; }

  private:
    dfl_session & session_;
};

// One call of a session that has memory to run in.
Turn running(dfl_session * session) {
    DFL_CHECK(session->session.model().measure() == DFL_MEASURE_NOTHING, DFL_STATUS_ARGUMENT,
              "the session was only measured: it has no memory to run in");
    return Turn(session);
}

} // namespace

dfl_status dfl_session_prefill(dfl_session * session, const int32_t * tokens, int64_t n,
                               float * all_logits, dfl_progress progress, void * user,
                               dfl_error * err) {
    return guard(err, [&] {
        need(session, tokens);
        dfl::PrefillProgress watch;
        if (progress != nullptr) {
            watch = [=](int64_t done, int64_t total) { return progress(user, done, total) != 0; };
        }
        running(session)->prefill(tokens, n, all_logits, watch);
    });
}

dfl_status dfl_session_argmax(dfl_session * session, int64_t row, int32_t * token,
                              dfl_error * err) {
    return guard(err, [&] {
        need(session, token);
        *token = running(session)->argmax(row);
    });
}

dfl_status dfl_session_keep_top(dfl_session * session, int32_t k, int32_t * kept, dfl_error * err) {
    return guard(err, [&] {
        need(session, kept);
        *kept = running(session)->keep_top(k) ? k : 0;
    });
}

dfl_status dfl_session_top(dfl_session * session, int64_t row, int32_t * tokens, float * logits,
                           dfl_error * err) {
    return guard(err, [&] {
        need(session, tokens, logits);
        const Turn turn = running(session);
        const dfl::Candidate * best = turn->top(row);
        for (int64_t i = 0; i < turn->n_top(); ++i) {
            tokens[i] = best[i].token;
            logits[i] = best[i].logit;
        }
    });
}

dfl_status dfl_session_logits(dfl_session * session, int64_t row, float * logits, dfl_error * err) {
    return guard(err, [&] {
        need(session, logits);
        running(session)->logits(row, logits);
    });
}

dfl_status dfl_session_draft(dfl_session * session, int32_t last_token, int64_t n_draft, int64_t k,
                             int32_t * tokens, float * logits, float * log_sum_exp,
                             dfl_error * err) {
    return guard(err, [&] {
        need(session, tokens);
        const dfl::Draft draft =
            running(session)->draft(last_token, n_draft, k, log_sum_exp != nullptr);
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
        Turn(session)->reserve_verify(n);
    });
}

dfl_status dfl_session_verify(dfl_session * session, const int32_t * tokens, int64_t n,
                              dfl_error * err) {
    return guard(err, [&] {
        need(session, tokens);
        running(session)->verify(tokens, nullptr, n);
    });
}

dfl_status dfl_session_verify_tree(dfl_session * session, const int32_t * tokens,
                                   const int32_t * parents, int64_t n, dfl_error * err) {
    return guard(err, [&] {
        need(session, tokens, parents);
        running(session)->verify(tokens, parents, n);
    });
}

dfl_status dfl_session_commit(dfl_session * session, int64_t n, dfl_error * err) {
    return guard(err, [&] {
        need(session);
        running(session)->commit(n);
    });
}

dfl_status dfl_session_commit_path(dfl_session * session, const int32_t * nodes, int64_t n,
                                   dfl_error * err) {
    return guard(err, [&] {
        need(session, nodes);
        running(session)->commit_path(nodes, n);
    });
}

dfl_status dfl_session_reset(dfl_session * session, dfl_error * err) {
    return guard(err, [&] {
        need(session);
        running(session)->reset();
    });
}

dfl_status dfl_session_truncate(dfl_session * session, int64_t position, dfl_error * err) {
    return guard(err, [&] {
        need(session);
        running(session)->truncate(position);
    });
}

dfl_status dfl_checkpoint_take(dfl_session * session, dfl_checkpoint ** checkpoint,
                               dfl_error * err) {
    return guard(err, [&] {
        need(session, checkpoint);
        *checkpoint = new dfl_checkpoint{running(session)->take()};
    });
}

dfl_status dfl_checkpoint_restore(dfl_session * session, const dfl_checkpoint * checkpoint,
                                  dfl_error * err) {
    return guard(err, [&] {
        need(session, checkpoint);
        running(session)->restore(checkpoint->checkpoint);
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
