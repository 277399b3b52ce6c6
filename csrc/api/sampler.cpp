// extern "C" bodies only: samplers, and what they draw of a pass.
#include "api/handles.h"

#include <algorithm>

using dfl::CallGuard;
using dfl::Candidate;
using dfl::guard;
using dfl::need;
using dfl::SeenTokens;

static void check(dfl::Sampler::Fault fault) {
    DFL_CHECK(fault == nullptr, DFL_STATUS_ARGUMENT, "%s", fault);
}

static void check_row(int64_t n) {
    DFL_CHECK(n > 0, DFL_STATUS_ARGUMENT, "a row of %lld logits: there is nothing to draw",
              (long long)n);
}

dfl_status dfl_sampler_create(const dfl_sampler_params * params, dfl_sampler ** sampler,
                              dfl_error * err) {
    return guard(err, [&] {
        need(params, sampler);
        dfl::SamplerParams p;
        p.temperature = params->temperature;
        p.top_k = params->top_k;
        p.top_p = params->top_p;
        p.min_p = params->min_p;
        p.repeat = params->repeat;
        p.presence = params->presence;
        p.frequency = params->frequency;
        p.repeat_last_n = params->repeat_last_n;
        p.seed = params->seed;
        p.sequence = params->sequence;
        for (int64_t i = 0; i < params->n_biased; ++i) {
            p.biases.push_back({params->biased[i], params->biases[i]});
        }
        p.banned.assign(params->banned, params->banned + params->n_banned);
        *sampler = new dfl_sampler{dfl::Sampler(std::move(p))};
    });
}

void dfl_sampler_free(dfl_sampler * sampler) { delete sampler; }

dfl_status dfl_sampler_choose(const dfl_sampler * sampler, const float * logits,
                              const int32_t * tokens, int64_t n, const int32_t * seen,
                              int64_t n_seen, int64_t position, int32_t * token, double * margin,
                              dfl_error * err) {
    return guard(err, [&] {
        need(sampler, logits, token, margin);
        check_row(n);
        dfl::Choice choice = {};
        if (tokens != nullptr) {
            std::vector<Candidate> best(n);
            for (int64_t i = 0; i < n; ++i) {
                best[i] = {tokens[i], logits[i]};
            }
            check(sampler->sampler.choose_among(best.data(), n, position, choice));
        } else {
            std::vector<float> row(logits, logits + n);
            check(sampler->sampler.choose(row.data(), n, {seen, n_seen}, position, choice));
        }
        *token = choice.token;
        *margin = choice.margin;
    });
}

dfl_status dfl_sampler_keep(const dfl_sampler * sampler, const float * logits, int64_t n,
                            const int32_t * seen, int64_t n_seen, int32_t * tokens, float * values,
                            int64_t * n_kept, dfl_error * err) {
    return guard(err, [&] {
        need(sampler, logits, tokens, values, n_kept);
        check_row(n);
        std::vector<float> row(logits, logits + n);
        std::vector<Candidate> kept;
        check(sampler->sampler.keep(row.data(), n, {seen, n_seen}, kept));
        for (const Candidate & one : kept) {
            *tokens++ = one.token;
            *values++ = one.logit;
        }
        *n_kept = static_cast<int64_t>(kept.size());
    });
}

dfl_status dfl_engine_choose(dfl_engine * engine, dfl_walk * walks, int64_t n_walks,
                             dfl_error * err) {
    return guard(err, [&] {
        need(engine, walks);
        std::vector<dfl::Walk> asked;
        for (int64_t i = 0; i < n_walks; ++i) {
            dfl_walk & walk = walks[i];
            need(walk.sequence, walk.sampler, walk.drawn);
            walk.n_drawn = 0;
            asked.push_back({&walk.sequence->sequence,
                             &walk.sampler->sampler,
                             {walk.seen, walk.seen + walk.n_seen},
                             walk.position,
                             {}});
        }
        const CallGuard guard_of_call(*engine->is_busy);
        engine->engine->choose(asked);
        for (int64_t i = 0; i < n_walks; ++i) {
            std::copy(asked[i].drawn.begin(), asked[i].drawn.end(), walks[i].drawn);
            walks[i].n_drawn = static_cast<int64_t>(asked[i].drawn.size());
        }
    });
}
