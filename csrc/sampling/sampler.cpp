#include "sampling/sampler.h"

#include "cpu/rows/row_kernel.h"
#include "error.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <iterator>
#include <limits>

namespace dfl {

static constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;
// Number of best tokens that top-p sorts first; 16 times as many while their mass is below top_p.
static constexpr int64_t N_MASS_FIRST = 256;

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// Turns the high 52 bits of a token's hash into Gumbel noise.
static double gumbel(uint64_t bits) {
    return -std::log(-std::log((static_cast<double>(bits) + 0.5) * 0x1p-52));
}

struct Race {
    int32_t token = 0;
    double best = -std::numeric_limits<double>::infinity(), second = best;
    int64_t n = 0;

    void add(int32_t id, double score) {
        if (n++ == 0 || score > best) {
            second = best;
            best = score;
            token = id;
        } else if (score > second) {
            second = score;
        }
    }
    SampledToken result(int64_t n_candidates) const {
        return {token, n_candidates > 1 ? best - second : std::numeric_limits<double>::infinity()};
    }
};

static Sampler::Fault fault_of(const float * row, int64_t n, const Maxima & maxima) {
    if (!maxima.is_finite) {
        const bool has_nan = std::any_of(row, row + n, [](float x) { return std::isnan(x); });
        return has_nan ? "the logits hold NaN" : "the logits hold +inf";
    }
    return maxima.largest() == -INFINITY ? "no token is left to sample: every logit is -inf"
                                         : nullptr;
}

// Applies biases, bans and penalties to logits; the destructor restores the logits.
class Sampler::Adjusted {
  public:
    Adjusted(float * row, int64_t n, const Sampler & sampler, TokenHistory history)
        : Adjusted(sampler, history, n,
                   [=](int32_t token) { return token >= 0 && token < n ? row + token : nullptr; }) {
    }
    // find: returns the logit of a token, or NULL for a token without one. History must be in
    // [0, n).
    template <typename Find>
    Adjusted(const Sampler & sampler, TokenHistory history, int64_t n, const Find & find) {
        const SamplerParams & params = sampler.params_;
        for (const Candidate & bias : params.biases) {
            if (float * logit = find(bias.token)) {
                set(logit, *logit + bias.logit);
            }
        }
        for (const int32_t token : params.banned) {
            if (float * logit = find(token)) {
                set(logit, -INFINITY);
            }
        }
        if (!sampler.has_penalties() || history.n == 0) {
            return;
        }
        const int64_t n_recent = std::min(history.n, params.repeat_last_n);
        std::vector<int32_t> recent(history.tokens + (history.n - n_recent),
                                    history.tokens + history.n);
        std::sort(recent.begin(), recent.end());
        const int32_t outside = recent.front() < 0 ? recent.front() : recent.back();
        if (outside < 0 || outside >= n) {
            put_back();
            throw Error(DFL_STATUS_ARGUMENT, format("token id %d is outside the vocabulary of %lld",
                                                    outside, (long long)n));
        }
        for (auto at = recent.begin(); at != recent.end();) {
            const auto end = std::find_if(at, recent.end(), [&](int32_t id) { return id != *at; });
            const auto count = static_cast<float>(end - at);
            if (float * logit = find(*at)) {
                const float scaled = *logit <= 0 ? *logit * params.repeat : *logit / params.repeat;
                set(logit, scaled - (count * params.frequency + params.presence));
            }
            at = end;
        }
    }
    Adjusted(const Adjusted &) = delete;
    Adjusted & operator=(const Adjusted &) = delete;
    ~Adjusted() { put_back(); }

  private:
    void set(float * logit, float value) {
        before_.emplace_back(logit, *logit);
        *logit = value;
    }
    void put_back() {
        for (auto at = before_.rbegin(); at != before_.rend(); ++at) {
            *at->first = at->second;
        }
    }

    std::vector<std::pair<float *, float>> before_;
};

Sampler::Sampler(SamplerParams params) : params_(std::move(params)) {
    std::sort(params_.banned.begin(), params_.banned.end());
}

bool Sampler::is_banned(int32_t token) const {
    return std::binary_search(params_.banned.begin(), params_.banned.end(), token);
}

bool Sampler::has_penalties() const {
    return params_.repeat_last_n > 0 &&
           (params_.repeat != 1.0f || params_.presence != 0.0f || params_.frequency != 0.0f);
}

bool Sampler::may_raise_logits() const {
    return (has_penalties() &&
            (params_.repeat < 1.0f || params_.presence < 0.0f || params_.frequency < 0.0f)) ||
           std::any_of(params_.biases.begin(), params_.biases.end(),
                       [](const Candidate & bias) { return !(bias.logit <= 0.0f); });
}

int64_t Sampler::n_best() const {
    if (is_argmax() || may_raise_logits()) {
        return 0;
    }
    return params_.temperature == 0.0 ? 2 : std::max<int64_t>(0, params_.top_k);
}

bool Sampler::has_cutoffs(int64_t n) const {
    return (params_.top_k > 0 && params_.top_k < n) || params_.min_p > 0.0 || params_.top_p < 1.0;
}

void mask_row(const float * row, const uint32_t * mask, int64_t n, float * masked) {
    for (int64_t first = 0; first < n; first += 32) {
        const int64_t end = std::min<int64_t>(n, first + 32);
        const uint32_t bits = mask[first / 32];
        if (bits == 0) { // most words of most masks
            std::fill(masked + first, masked + end, -INFINITY);
            continue;
        }
        for (int64_t i = first; i < end; ++i) {
            masked[i] = bits >> (i - first) & 1 ? row[i] : -INFINITY;
        }
    }
}

uint64_t Sampler::noise_state(int64_t position) const {
    uint64_t state = 0;
    for (const uint64_t a : {params_.seed, params_.sequence, static_cast<uint64_t>(position)}) {
        state = mix((state ^ a) + GOLDEN);
    }
    return state;
}

Sampler::Fault Sampler::sample(float * row, int64_t n, TokenHistory history, int64_t position,
                               SampledToken & sampled) const {
    const Adjusted adjusted(row, n, *this, history);
    const Maxima maxima(row, n);
    if (const Fault fault = fault_of(row, n, maxima)) {
        return fault;
    }
    if (params_.temperature == 0.0) {
        std::vector<Candidate> best;
        append_best(row, n, std::min<int64_t>(n, 2), maxima, best);
        const double infinite = std::numeric_limits<double>::infinity();
        sampled = {best[0].token, n > 1 ? (double)best[0].logit - best[1].logit : infinite};
    } else if (has_cutoffs(n)) {
        std::vector<Candidate> candidates;
        filter_row(row, n, maxima, candidates);
        sampled = sample_candidates(candidates, position);
    } else {
        sampled = sample_full_row(row, n, maxima, position);
    }
    return nullptr;
}

bool Sampler::sample_from(const Candidate * best, int64_t n, TokenHistory history, int64_t position,
                          const uint32_t * mask, SampledToken & sampled) const {
    std::vector<Candidate> raw(best, best + n), candidates;
    {
        const int64_t any = std::numeric_limits<int64_t>::max();
        const Adjusted adjusted(*this, history, any, [&](int32_t token) {
            const auto at = std::find_if(raw.begin(), raw.end(),
                                         [&](const Candidate & one) { return one.token == token; });
            return at != raw.end() ? &at->logit : nullptr;
        });
        candidates = raw;
    }
    for (Candidate & one : candidates) {
        one.logit = is_allowed(mask, one.token) ? one.logit : -INFINITY;
    }
    std::sort(candidates.begin(), candidates.end(), is_better);
    candidates.resize(n_best());
    // Tokens that are not in the list are worse than its last, and nothing makes them better.
    if (is_better(best[n - 1], candidates.back()) || !std::isfinite(candidates.front().logit)) {
        return false;
    }
    if (params_.temperature == 0.0) {
        sampled = {candidates[0].token, (double)candidates[0].logit - candidates[1].logit};
        return true;
    }
    apply_cutoffs(candidates, -1.0);
    sampled = sample_candidates(candidates, position);
    return true;
}

int32_t Sampler::predict(const std::vector<Candidate> & best, int64_t position) const {
    std::vector<Candidate> candidates;
    std::copy_if(best.begin(), best.end(), std::back_inserter(candidates),
                 [&](const Candidate & one) { return !is_banned(one.token); });
    if (candidates.empty() || !std::isfinite(candidates.front().logit)) {
        return best.front().token;
    }
    if (params_.temperature == 0.0) {
        return candidates.front().token;
    }
    if (params_.top_k > 0) {
        candidates.resize(std::min<size_t>(candidates.size(), params_.top_k));
    }
    apply_cutoffs(candidates, -1.0);
    return sample_candidates(candidates, position).token;
}

Sampler::Fault Sampler::filter(float * row, int64_t n, TokenHistory history,
                               std::vector<Candidate> & candidates) const {
    const Adjusted adjusted(row, n, *this, history);
    const Maxima maxima(row, n);
    if (const Fault fault = fault_of(row, n, maxima)) {
        return fault;
    }
    if (params_.temperature == 0.0) {
        append_best(row, n, 1, maxima, candidates);
    } else if (has_cutoffs(n)) {
        filter_row(row, n, maxima, candidates);
    } else {
        for (int64_t i = 0; i < n; ++i) {
            candidates.push_back({static_cast<int32_t>(i), row[i]});
        }
    }
    return nullptr;
}

static double weight(const Candidate & one, const Candidate & best) {
    return std::exp(static_cast<double>(one.logit) - best.logit);
}

void Sampler::filter_row(const float * row, int64_t n, const Maxima & maxima,
                         std::vector<Candidate> & candidates) const {
    if (params_.top_k > 0 && params_.top_k < n) {
        append_best(row, n, params_.top_k, maxima, candidates);
        apply_cutoffs(candidates, -1.0);
        return;
    }
    const float best = maxima.largest();
    const double mass = params_.top_p < 1.0 ? cpu::row_kernel()->sum_exp(row, n, best) : -1.0;
    if (params_.min_p > 0.0) {
        const float floor = best + std::log(static_cast<float>(params_.min_p));
        append_from(row, n, std::max(floor, -FLT_MAX), maxima, candidates);
        apply_cutoffs(candidates, mass);
        return;
    }
    for (int64_t n_first = N_MASS_FIRST; n_first < n; n_first *= 16) {
        candidates.clear();
        append_best(row, n, n_first, maxima, candidates);
        double sum = 0.0;
        for (const Candidate & one : candidates) {
            sum += weight(one, candidates.front());
        }
        if (sum >= params_.top_p * mass) {
            apply_cutoffs(candidates, mass);
            return;
        }
    }
    candidates.clear();
    append_from(row, n, -FLT_MAX, maxima, candidates);
    apply_cutoffs(candidates, mass);
}

// Applies min-p and top-p to candidates sorted best first. mass: total weight() of the tokens that
// top_p is a share of; if negative, the total of these candidates.
void Sampler::apply_cutoffs(std::vector<Candidate> & candidates, double mass) const {
    const Candidate best = candidates.front();
    float floor = -FLT_MAX;
    if (params_.min_p > 0.0) {
        floor = std::max(floor, best.logit + std::log(static_cast<float>(params_.min_p)));
    }
    if (params_.top_p < 1.0) {
        if (mass < 0.0) {
            mass = 0.0;
            for (const Candidate & one : candidates) {
                mass += weight(one, best);
            }
        }
        double sum = 0.0;
        size_t n = 0;
        while (n < candidates.size()) {
            sum += weight(candidates[n++], best);
            if (sum >= params_.top_p * mass) {
                break;
            }
        }
        candidates.resize(n);
    }
    size_t n = candidates.size();
    while (n > 1 && candidates[n - 1].logit < floor) {
        --n;
    }
    candidates.resize(n);
}

SampledToken Sampler::sample_candidates(const std::vector<Candidate> & candidates,
                                        int64_t position) const {
    const uint64_t state = noise_state(position);
    const double best = candidates.front().logit;
    Race race;
    for (const Candidate & one : candidates) {
        const uint64_t bits = mix(state + (static_cast<uint64_t>(one.token) + 1) * GOLDEN) >> 12;
        race.add(one.token, (one.logit - best) / params_.temperature + gumbel(bits));
    }
    return race.result(static_cast<int64_t>(candidates.size()));
}

// Skips tokens whose hash gives too little noise to reach the two best scores, without logarithms.
SampledToken Sampler::sample_full_row(const float * row, int64_t n, const Maxima & maxima,
                                      int64_t position) const {
    const uint64_t state = noise_state(position);
    const double best = maxima.largest();
    Race race;
    uint64_t bits[cpu::BLOCK];
    for (size_t block = 0; block < maxima.of_blocks.size(); ++block) {
        const int64_t from = static_cast<int64_t>(block) * cpu::BLOCK;
        const int64_t size = std::min(n - from, cpu::BLOCK);
        const uint64_t max_bits = cpu::row_kernel()->noise(state, from, size, bits);
        uint64_t min_bits = 0; // smallest token hash that can reach the two best scores
        if (std::isfinite(race.second)) {
            const double of_best = (maxima.of_blocks[block] - best) / params_.temperature;
            const double needed = std::min(race.second - of_best, 100.0); // Gumbel noise is < 37
            const double u = std::exp(-std::exp(-(needed - 1e-9 * (1.0 + std::fabs(needed)))));
            min_bits = static_cast<uint64_t>(std::max(0.0, u * 0x1p52 - 4.0));
        }
        if (max_bits < min_bits) {
            continue;
        }
        for (int64_t i = 0; i < size; ++i) {
            if (bits[i] >= min_bits) {
                race.add(static_cast<int32_t>(from + i),
                         (row[from + i] - best) / params_.temperature + gumbel(bits[i]));
            }
        }
    }
    return race.result(n);
}

} // namespace dfl
