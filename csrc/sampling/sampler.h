// Samples the next token from a row of logits, independently of speculation. Applies biases, banned
// tokens, penalties, top-k, top-p, min-p and temperature, then takes the token with the largest
//
//     (logit - best logit) / temperature + gumbel(seed, sequence, position in its text, token)
//
// which is an exact draw from the softmax and needs no generator state. The noise, bit for bit:
//
//     mix(x)  = x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB;
//               x ^ x >> 31                         in unsigned 64-bit arithmetic that wraps
//     state   = 0; for each a of (seed, sequence, position): state = mix((state ^ a) + G)
//     bits    = mix(state + (token + 1) * G)        with G = 0x9E3779B97F4A7C15
//     u       = ((bits >> 12) + 0.5) * 2^-52        exact, 0 < u < 1
//     gumbel  = -log(-log(u))                       in double precision
#pragma once

#include "sampling/top_k.h"

#include <cstdint>
#include <vector>

namespace dfl {

struct SamplerParams {
    double temperature = 0.0; // 0: greedy decoding, which ignores top_k, top_p and min_p
    int64_t top_k = 0;        // 0 or less: top-k is off
    double top_p = 1.0, min_p = 0.0;
    float repeat = 1.0f, presence = 0.0f, frequency = 0.0f;
    int64_t repeat_last_n = 0; // number of last tokens that penalties count; 0: none
    uint64_t seed = 0, sequence = 0;
    std::vector<Candidate> biases; // logits to add; tokens outside the vocabulary are ignored
    std::vector<int32_t> banned;
};

// Token ids of prompt and answer so far, for penalties.
struct TokenHistory {
    const int32_t * tokens;
    int64_t n;
};

// mask: bits of allowed tokens; NULL: all.
inline bool is_allowed(const uint32_t * mask, int64_t token) {
    return mask == nullptr || (mask[token / 32] >> (token % 32) & 1) != 0;
}

// Copies a row of n logits with -INFINITY for the tokens that a mask forbids.
void mask_row(const float * row, const uint32_t * mask, int64_t n, float * masked);

struct SampledToken {
    int32_t token;
    double margin; // best score minus second best score; infinite for one candidate
};

class Sampler {
  public:
    explicit Sampler(SamplerParams params);

    // True if the sampled token is the largest logit among tokens that are not banned.
    bool is_argmax() const { return params_.temperature == 0.0 && !changes_logits(); }
    bool is_banned(int32_t token) const;
    // Returns how many of a row's largest logits sample_from() needs at least. 0: the sampled token
    // is the argmax, or sample_from() cannot be used: without top-k, or if a bias or penalty can
    // raise a logit.
    int64_t n_best() const;

    // Error message for a row from which no token can be sampled; NULL if one can be sampled.
    using Fault = const char *;
    // Samples the token of a position from a row of n logits; the row is modified during the call.
    // Throws DFL_STATUS_ARGUMENT if the history has token ids outside the vocabulary.
    Fault sample(float * row, int64_t n, TokenHistory history, int64_t position,
                 SampledToken & sampled) const;
    // Samples the token of a position from a row's n largest logits, best first; n >= n_best() > 0.
    // mask: bits of allowed tokens; NULL: all. False if the whole row is needed: too many of these
    // tokens are lowered or not allowed, or none can be sampled.
    bool sample_from(const Candidate * best, int64_t n, TokenHistory history, int64_t position,
                     const uint32_t * mask, SampledToken & sampled) const;
    // Predicts the token of a position from a drafter's candidates, best first. Penalties and
    // biases are left out, and top-p counts the candidates alone.
    int32_t predict(const std::vector<Candidate> & best, int64_t position) const;
    // Appends the candidates that may be sampled, best first; without cutoffs all tokens, by id.
    Fault filter(float * row, int64_t n, TokenHistory history,
                 std::vector<Candidate> & candidates) const;

  private:
    bool has_penalties() const;
    bool may_raise_logits() const;
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

    SamplerParams params_;
};

} // namespace dfl
