// peer-rounds: the loop of llama.cpp's llama-speculative-simple with draft-dflash or draft-mtp, and
// with a clock around each phase. Reads JSON lines, each with one prompt, and writes a JSON line
// for each.
//
// Input: prompt, token ids; n_predict, maximum tokens of the answer; text, optional token ids that
// the target is forced to choose; accept, optional with text: number of drafted tokens that each
// round accepts, although all rows are drafted, verified and sampled; plain, optional: true to
// draft nothing. Output: tokens; rounds, each [answer's tokens before it, drafted, accepted]; us,
// microseconds of each round by phase. In phase inject the drafter computes its K/V from hidden
// states of verified rows.
#include "arg.h"
#include "common.h"
#include "llama.h"
#include "sampling.h"
#include "speculative.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <stdexcept>
#include <string>

using nlohmann::ordered_json;

static const char * const PHASES[] = {"draft", "verify", "inject", "sample", "commit", "total"};

struct Job {
    llama_tokens prompt;
    llama_tokens text;
    int n_predict = 0;
    int accept = -1;
    bool plain = false;
};

struct Answer {
    llama_tokens tokens;
    ordered_json rounds = ordered_json::array();
    ordered_json us = ordered_json::object();
};

class Clock {
  public:
    explicit Clock(ordered_json & us) : us_(us) {}

    // Adds the microseconds since the last lap (or start) to a phase.
    void lap(const char * phase) {
        const int64_t now = ggml_time_us();
        us_[phase].push_back(now - last_);
        last_ = now;
    }
    void start() { first_ = last_ = ggml_time_us(); }
    void stop() { us_["total"].push_back(last_ - first_); }

  private:
    ordered_json & us_;
    int64_t first_ = 0, last_ = 0;
};

class Peer {
  public:
    explicit Peer(common_params & params)
        : params_(params), target_(common_init_from_params(params)) {
        tgt_ = target_->context();
        if (tgt_ == nullptr) {
            throw std::runtime_error("the target cannot be loaded");
        }
        common_params draft = common_base_params_to_speculative(params);
        drafter_ = common_speculative_init_from_params(draft, target_->model(), tgt_);
        dft_ = drafter_->context();
        if (dft_ == nullptr) {
            throw std::runtime_error("the drafter cannot be loaded");
        }
        for (llama_context * ctx : {tgt_, dft_}) {
            const auto kind = common_context_can_seq_rm(ctx);
            if (kind != COMMON_CONTEXT_SEQ_RM_TYPE_PART && kind != COMMON_CONTEXT_SEQ_RM_TYPE_RS) {
                throw std::runtime_error(
                    "this model cannot remove its last tokens without checkpoints");
            }
        }
        params.speculative.draft.ctx_tgt = tgt_;
        params.speculative.draft.ctx_dft = dft_;
        spec_.reset(common_speculative_init(params.speculative, 1));
        if (!spec_) {
            throw std::runtime_error(
                "speculative decoding cannot be initialised; check --spec-type");
        }
    }

    Answer run(const Job & job) {
        Answer answer;
        common_sampler_ptr sampler(common_sampler_init(target_->model(), params_.sampling));
        llama_tokens seen = prefill(job.prompt);
        llama_token last = job.prompt.back();
        bool ended = false;
        for (Clock clock(answer.us); !ended && (int)answer.tokens.size() < job.n_predict;) {
            clock.start();
            const llama_tokens draft =
                job.plain ? llama_tokens() : propose(job, answer, seen, last);
            clock.lap("draft");
            common_batch batch(tgt_);
            batch.add(last, seen.size(), 0, true);
            for (const llama_token token : draft) {
                batch.add(token, seen.size() + batch.size(), 0, true);
            }
            run(tgt_, batch);
            clock.lap("verify");
            if (!job.plain) {
                feed(batch);
            }
            clock.lap("inject");
            const size_t before = answer.tokens.size();
            const size_t n_accepted = choose(job, draft, sampler.get(), answer);
            clock.lap("sample");
            seen.push_back(last);
            seen.insert(seen.end(), answer.tokens.begin() + before, answer.tokens.end() - 1);
            last = answer.tokens.back();
            forget_from(tgt_, seen.size());
            forget_from(dft_, seen.size());
            clock.lap("commit");
            clock.stop();
            answer.rounds.push_back({before, draft.size(), n_accepted});
            ended = llama_vocab_is_eog(llama_model_get_vocab(target_->model()), last);
        }
        return answer;
    }

  private:
    static void run(llama_context * ctx, common_batch & batch) {
        if (llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get()) != 0) {
            throw std::runtime_error("llama_process failed");
        }
        llama_synchronize(ctx);
    }

    void feed(const common_batch & batch) {
        if (!common_speculative_process(spec_.get(), batch)) {
            throw std::runtime_error("common_speculative_process failed");
        }
        llama_synchronize(dft_);
    }

    static void forget_from(llama_context * ctx, llama_pos position) {
        llama_memory_seq_rm(llama_get_memory(ctx), 0, position, -1);
    }

    // Computes all tokens of the prompt but the last, in target and drafter; returns these tokens.
    llama_tokens prefill(const llama_tokens & prompt) {
        llama_memory_clear(llama_get_memory(tgt_), false);
        llama_memory_clear(llama_get_memory(dft_), false);
        llama_tokens seen(prompt.begin(), prompt.end() - 1);
        const int64_t step = llama_n_batch(tgt_);
        for (int64_t first = 0; first < (int64_t)seen.size(); first += step) {
            common_batch batch(tgt_);
            for (int64_t i = first; i < std::min<int64_t>(first + step, seen.size()); ++i) {
                batch.add(seen[i], i, 0, false);
            }
            run(tgt_, batch);
            feed(batch);
        }
        common_speculative_begin(spec_.get(), 0, seen);
        return seen;
    }

    llama_tokens propose(const Job & job, const Answer & answer, const llama_tokens & seen,
                         llama_token last) {
        llama_tokens draft;
        common_speculative_get_draft_params(spec_.get(), 0) = {
            true, params_.speculative.draft.n_max, (llama_pos)seen.size(), last, &seen, &draft};
        common_speculative_draft(spec_.get());
        forget_from(dft_, seen.size()); // Removes the draft's mask tokens from the drafter's K/V.
        // A draft leaves room for the target's own token within n_predict.
        const size_t left = job.n_predict - answer.tokens.size();
        draft.resize(std::min(draft.size(), left - 1));
        if (job.accept >= 0) {
            for (size_t i = 0; i < draft.size(); ++i) {
                const llama_token wanted = job.text[answer.tokens.size() + i];
                draft[i] = (int)i < job.accept ? wanted : (wanted + 1) % 8;
            }
        }
        return draft;
    }

    // Appends the target's tokens to the answer, up to the first that differs from the draft.
    // Returns the number of accepted candidates.
    size_t choose(const Job & job, const llama_tokens & draft, common_sampler * sampler,
                  Answer & answer) {
        const size_t first = answer.tokens.size();
        size_t n_accepted = 0;
        for (size_t i = 0; i <= draft.size(); ++i) {
            llama_token token = common_sampler_sample(sampler, tgt_, i);
            if (!job.text.empty()) {
                token = job.text[first + i];
            }
            common_sampler_accept(sampler, token, true);
            answer.tokens.push_back(token);
            const bool accepted = i < draft.size() && draft[i] == token;
            n_accepted += accepted;
            if (!accepted || llama_vocab_is_eog(llama_model_get_vocab(target_->model()), token)) {
                break;
            }
        }
        if (!job.plain) {
            common_speculative_accept(spec_.get(), 0, n_accepted);
        }
        return n_accepted;
    }

    common_params & params_;
    common_init_result_ptr target_;
    common_speculative_init_result_ptr drafter_;
    llama_context * tgt_ = nullptr;
    llama_context * dft_ = nullptr;
    common_speculative_ptr spec_;
};

static Job read_job(const std::string & line) {
    const auto json = ordered_json::parse(line);
    Job job;
    job.prompt = json.at("prompt").get<llama_tokens>();
    job.n_predict = json.at("n_predict").get<int>();
    job.text = json.value("text", llama_tokens());
    job.accept = json.value("accept", -1);
    job.plain = json.value("plain", false);
    if (job.prompt.size() < 2 || job.n_predict < 1) {
        throw std::runtime_error(
            "a job needs a prompt of at least 2 tokens and n_predict of at least 1");
    }
    if ((!job.text.empty() || job.accept >= 0) && (int)job.text.size() < job.n_predict) {
        throw std::runtime_error("the text of a job must have at least n_predict tokens");
    }
    return job;
}

int main(int argc, char ** argv) {
    common_init();
    common_params params;
    if (!common_params_parse(argc, argv, params, LLAMA_EXAMPLE_SPECULATIVE)) {
        return 1;
    }
    try {
        const int n_max = common_speculative_n_max(&params.speculative);
        const auto limits = common_speculative_get_output_limits(params.n_batch, 1, n_max);
        params.n_outputs_max = limits.total;
        params.n_outputs_max_per_seq = limits.per_seq;
        llama_backend_init();
        Peer peer(params);
        for (std::string line; std::getline(std::cin, line);) {
            const Answer answer = peer.run(read_job(line));
            const ordered_json json = {
                {"tokens", answer.tokens}, {"rounds", answer.rounds}, {"us", answer.us}};
            std::cout << json.dump() << std::endl;
        }
    } catch (const std::exception & error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        return 1;
    }
    return 0;
}
