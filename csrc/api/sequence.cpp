// extern "C" bodies only: sequences and checkpoints.
#include "api/handles.h"

#include <algorithm>

using dfl::guard;
using dfl::need;
using dfl::Turn;

dfl_status dfl_sequence_create(dfl_engine * engine, dfl_sequence ** sequence, dfl_error * err) {
    return guard(err, [&] {
        need(engine, sequence);
        const Turn turn(*engine->is_busy);
        *sequence = new dfl_sequence(*engine);
    });
}

void dfl_sequence_free(dfl_sequence * sequence) { delete sequence; }

int64_t dfl_sequence_position(const dfl_sequence * sequence) {
    return sequence != nullptr ? sequence->sequence.position() : -1;
}

dfl_status dfl_sequence_sync(dfl_sequence * sequence, const int32_t * tokens, int64_t n,
                             int64_t * n_kept, dfl_error * err) {
    return guard(err, [&] {
        need(sequence, tokens, n_kept);
        const Turn turn(*sequence->is_busy);
        *n_kept = sequence->sequence.sync(tokens, n);
    });
}

dfl_status dfl_sequence_prefill(dfl_sequence * sequence, const int32_t * tokens, int64_t n,
                                float * all_logits, dfl_progress progress, void * user,
                                dfl_error * err) {
    return guard(err, [&] {
        need(sequence, tokens);
        dfl::PrefillProgress watch;
        if (progress != nullptr) {
            watch = [=](int64_t done, int64_t total) { return progress(user, done, total) != 0; };
        }
        const Turn turn(*sequence->is_busy);
        sequence->sequence.prefill(tokens, n, all_logits, watch);
    });
}

dfl_status dfl_sequence_argmax(dfl_sequence * sequence, int64_t row, int32_t * token,
                               dfl_error * err) {
    return guard(err, [&] {
        need(sequence, token);
        const Turn turn(*sequence->is_busy);
        *token = sequence->sequence.argmax(row);
    });
}

dfl_status dfl_sequence_top(dfl_sequence * sequence, int64_t row, int32_t k, int32_t * tokens,
                            float * logits, dfl_error * err) {
    return guard(err, [&] {
        need(sequence, tokens, logits);
        const Turn turn(*sequence->is_busy);
        const dfl::Candidate * best = sequence->sequence.top(row, k);
        for (int32_t i = 0; i < k; ++i) {
            tokens[i] = best[i].token;
            logits[i] = best[i].logit;
        }
    });
}

dfl_status dfl_sequence_logits(dfl_sequence * sequence, int64_t row, float * logits,
                               dfl_error * err) {
    return guard(err, [&] {
        need(sequence, logits);
        const Turn turn(*sequence->is_busy);
        sequence->sequence.logits(row, logits);
    });
}

dfl_status dfl_sequence_draft(dfl_sequence * sequence, int32_t last_token, int64_t n_draft,
                              int64_t k, int32_t * tokens, float * logits, float * log_sum_exp,
                              dfl_error * err) {
    return guard(err, [&] {
        need(sequence, tokens);
        const Turn turn(*sequence->is_busy);
        const dfl::Draft draft =
            sequence->sequence.draft(last_token, n_draft, k, log_sum_exp != nullptr);
        for (size_t i = 0; i < draft.best.size(); ++i) {
            tokens[i] = draft.best[i].token;
            if (logits != nullptr) {
                logits[i] = draft.best[i].logit;
            }
        }
        std::copy(draft.log_sum_exp.begin(), draft.log_sum_exp.end(), log_sum_exp);
    });
}

dfl_status dfl_sequence_verify(dfl_sequence * sequence, const int32_t * tokens, int64_t n,
                               dfl_error * err) {
    return guard(err, [&] {
        need(sequence, tokens);
        const Turn turn(*sequence->is_busy);
        sequence->sequence.verify(tokens, nullptr, n);
    });
}

dfl_status dfl_sequence_verify_tree(dfl_sequence * sequence, const int32_t * tokens,
                                    const int32_t * parents, int64_t n, dfl_error * err) {
    return guard(err, [&] {
        need(sequence, tokens, parents);
        const Turn turn(*sequence->is_busy);
        sequence->sequence.verify(tokens, parents, n);
    });
}

dfl_status dfl_sequence_commit(dfl_sequence * sequence, int64_t n, dfl_error * err) {
    return guard(err, [&] {
        need(sequence);
        const Turn turn(*sequence->is_busy);
        sequence->sequence.commit(n);
    });
}

dfl_status dfl_sequence_commit_path(dfl_sequence * sequence, const int32_t * nodes, int64_t n,
                                    dfl_error * err) {
    return guard(err, [&] {
        need(sequence, nodes);
        const Turn turn(*sequence->is_busy);
        sequence->sequence.commit_path(nodes, n);
    });
}

dfl_status dfl_sequence_reset(dfl_sequence * sequence, dfl_error * err) {
    return guard(err, [&] {
        need(sequence);
        const Turn turn(*sequence->is_busy);
        sequence->sequence.reset();
    });
}

dfl_status dfl_sequence_truncate(dfl_sequence * sequence, int64_t position, dfl_error * err) {
    return guard(err, [&] {
        need(sequence);
        const Turn turn(*sequence->is_busy);
        sequence->sequence.truncate(position);
    });
}

dfl_status dfl_checkpoint_take(dfl_sequence * sequence, dfl_checkpoint ** checkpoint,
                               dfl_error * err) {
    return guard(err, [&] {
        need(sequence, checkpoint);
        const Turn turn(*sequence->is_busy);
        *checkpoint = new dfl_checkpoint{sequence->sequence.take()};
    });
}

dfl_status dfl_checkpoint_restore(dfl_sequence * sequence, const dfl_checkpoint * checkpoint,
                                  dfl_error * err) {
    return guard(err, [&] {
        need(sequence, checkpoint);
        const Turn turn(*sequence->is_busy);
        sequence->sequence.restore(checkpoint->checkpoint);
    });
}

int32_t dfl_checkpoint_is_valid(const dfl_sequence * sequence, const dfl_checkpoint * checkpoint) {
    return sequence != nullptr && checkpoint != nullptr &&
           sequence->sequence.holds(checkpoint->checkpoint);
}

int64_t dfl_checkpoint_position(const dfl_checkpoint * checkpoint) {
    return checkpoint != nullptr ? static_cast<int64_t>(checkpoint->checkpoint.tokens.size()) : -1;
}

void dfl_checkpoint_free(dfl_checkpoint * checkpoint) { delete checkpoint; }
