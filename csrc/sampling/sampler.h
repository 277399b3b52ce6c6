// Samples the next token from a row of logits, so that speculation cannot change it: biases,
// banned tokens, penalties, top-k, top-p, min-p, temperature, and then the largest of
//
//     (logit - best logit) / temperature + gumbel(seed, sequence, position, token)
//
// which draws exactly from their softmax and keeps no state. The noise, bit for bit (unsigned
// 64-bit arithmetic, wrapping):
//
//     mix(x)  = x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB;
//               x ^ x >> 31
//     state   = 0; for each a of (seed, sequence, position): state = mix((state ^ a) + G)
//     bits    = mix(state + (token + 1) * G)        with G = 0x9E3779B97F4A7C15
//     u       = ((bits >> 12) + 0.5) * 2^-52        exact, 0 < u < 1
//     gumbel  = -log(-log(u))                       in double precision
//
// A position is the index that the drawn token gets in its text.
#pragma once

#include "sampling/top_k.h"

#include <cstdint>
#include <vector>

namespace dfl {

struct SamplerParams {
    double temperature = 0.0; // 0: the best token; what follows is then idle up to min_p
    int64_t top_k = 0;        // 0 and below: all
    double top_p = 1.0, min_p = 0.0;
    float repeat = 1.0f, presence = 0.0f, frequency = 0.0f; // penalties
    int64_t repeat_last_n = 0;                              // tokens that they look back
    uint64_t seed = 0, sequence = 0;
    std::vector<Candidate> biases; // a token each; those outside the vocabulary do nothing
    std::vector<int32_t> banned;
};

// Prompt and answer so far, for penalties.
struct TokenHistory {
    const int32_t * tokens;
    int64_t n;
};

struct SampledToken {
    int32_t token;
    double margin; // score of the best less that of the second, infinite if one was kept
};

class Sampler {
  public:
    explicit Sampler(SamplerParams params);

    // Whether the largest logit is the answer, unless it is a banned one.
    bool is_argmax() const { return params_.temperature == 0.0 && !changes_logits(); }
    bool is_banned(int32_t token) const;
    // Number of a row's best tokens that suffice to sample from; 0: all are needed.
    int64_t n_best() const;

    // The defect of a row, as a sentence; NULL if a token can be sampled from it.
    using Fault = const char *;
    // Samples the token for a position from a row, which is changed meanwhile. Throws
    // DFL_STATUS_ARGUMENT for a history with ids outside the vocabulary.
    Fault sample(float * row, int64_t n, TokenHistory history, int64_t position,
                 SampledToken & sampled) const;
    // The same from the n_best() tokens of a row, or more, best first.
    Fault sample_from(const Candidate * best, int64_t n, int64_t position,
                      SampledToken & sampled) const;
    // The candidates that top-k, top-p and min-p leave of a row, best first; all in their own order
    // where none of them is on.
    Fault filter(float * row, int64_t n, TokenHistory history,
                 std::vector<Candidate> & candidates) const;

  private:
    bool has_penalties() const;
    bool changes_logits() const { return has_penalties() || !params_.biases.empty(); }
    bool has_cutoffs(int64_t n) const;
    uint64_t noise_state(int64_t position) const;
    void filter_row(const float * row, int64_t n, const Maxima & maxima,
                    std::vector<Candidate> & candidates) const;
    void apply_cutoffs(std::vector<Candidate> & candidates, double mass) const;
    SampledToken sample_candidates(const std::vector<Candidate> & candidates,
                                   int64_t position) const;
    SampledToken sample_full_row(const float * row, int64_t n, const Maxima & maxima,
                                 int64_t position) const;
    class Adjusted;

    SamplerParams params_; // banned tokens in order
};

} // namespace dfl
