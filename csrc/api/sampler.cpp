// Functions of the C ABI for samplers, and sampling from a pass.
#include "api/handles.h"

#include <algorithm>

using dfl::Candidate;
using dfl::guard;
using dfl::guard_busy;
using dfl::need;

static void check(dfl::Sampler::Fault fault) {
    DFL_CHECK(fault == nullptr, DFL_STATUS_ARGUMENT, "%s", fault);
}

static void check_row(int64_t n) {
    DFL_CHECK(n > 0, DFL_STATUS_ARGUMENT, "the row has %lld logits, expected at least 1",
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

int64_t dfl_sampler_n_best(const dfl_sampler * sampler) {
    return sampler == nullptr ? -1 : sampler->sampler.n_best();
}

void dfl_sampler_free(dfl_sampler * sampler) { delete sampler; }

dfl_status dfl_sampler_sample(const dfl_sampler * sampler, const float * logits,
                              const int32_t * tokens, int64_t n, const int32_t * history,
                              int64_t n_history, int64_t position, int32_t * token, double * margin,
                              dfl_error * err) {
    return guard(err, [&] {
        need(sampler, logits, token, margin);
        check_row(n);
        dfl::SampledToken sampled = {};
        if (tokens != nullptr) {
            const int64_t n_best = sampler->sampler.n_best();
            DFL_CHECK(
                n_best > 0, DFL_STATUS_ARGUMENT,
                "the sampler needs a whole row: it is greedy, has no top_k, or can raise a logit");
            std::vector<Candidate> best(n);
            for (int64_t i = 0; i < n; ++i) {
                best[i] = {tokens[i], logits[i]};
            }
            DFL_CHECK(n >= n_best &&
                          sampler->sampler.sample_from(best.data(), n, {history, n_history},
                                                       position, nullptr, sampled),
                      DFL_STATUS_ARGUMENT, "the %lld best logits of the row do not suffice",
                      (long long)n);
        } else {
            std::vector<float> row(logits, logits + n);
            check(sampler->sampler.sample(row.data(), n, {history, n_history}, position, sampled));
        }
        *token = sampled.token;
        *margin = sampled.margin;
    });
}

dfl_status dfl_sampler_filter(const dfl_sampler * sampler, const float * logits, int64_t n,
                              const int32_t * history, int64_t n_history, int32_t * tokens,
                              float * values, int64_t * n_left, dfl_error * err) {
    return guard(err, [&] {
        need(sampler, logits, tokens, values, n_left);
        check_row(n);
        std::vector<float> row(logits, logits + n);
        std::vector<Candidate> candidates;
        check(sampler->sampler.filter(row.data(), n, {history, n_history}, candidates));
        for (const Candidate & one : candidates) {
            *tokens++ = one.token;
            *values++ = one.logit;
        }
        *n_left = static_cast<int64_t>(candidates.size());
    });
}

dfl_status dfl_engine_sample(dfl_engine * engine, dfl_sample_request * requests, int64_t n_requests,
                             dfl_error * err) {
    return guard_busy(engine, err, [&] {
        need(requests);
        std::vector<dfl::SampleRequest> parsed;
        for (int64_t i = 0; i < n_requests; ++i) {
            dfl_sample_request & request = requests[i];
            need(request.sequence, request.sampler, request.sampled);
            request.n_sampled = 0;
            parsed.push_back({&request.sequence->sequence,
                              &request.sampler->sampler,
                              {request.history, request.history + request.n_history},
                              request.position,
                              request.masks,
                              {}});
        }
        engine->engine->sample(parsed);
        for (int64_t i = 0; i < n_requests; ++i) {
            std::copy(parsed[i].sampled.begin(), parsed[i].sampled.end(), requests[i].sampled);
            requests[i].n_sampled = static_cast<int64_t>(parsed[i].sampled.size());
        }
    });
}
