// Largest logits of a row, found on the CPU.
#pragma once

#include "graph/candidate.h"

#include <cmath>
#include <cstdint>
#include <vector>

namespace dfl {

// Orders candidates: larger logit first, then lower token id, NaNs last, because std::sort may
// access memory outside its range without a strict order.
inline bool is_better(const Candidate & a, const Candidate & b) {
    if (std::isnan(a.logit) || std::isnan(b.logit)) {
        return std::isnan(b.logit) && !std::isnan(a.logit);
    }
    return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
}

// True if no value is NaN or +inf; -inf is allowed, because rows ban tokens by it.
bool all_finite(const float * logits, int64_t n);

// Returns the index of the first largest of n values; n if all are NaN.
int64_t first_largest(const float * x, int64_t n);

// Largest value of each block of cpu::BLOCK values of a row, so that searches skip most blocks.
struct Maxima {
    std::vector<float> of_blocks; // -inf for a block that holds only NaNs
    bool is_finite;               // true if no value of the row is NaN or +inf

    Maxima(const float * x, int64_t n);
    float largest() const;
};

// Appends the k largest of n values, best first, lower index first on ties; k is at most n.
void append_best(const float * x, int64_t n, int64_t k, std::vector<Candidate> & out);
// Appends the k largest of n values, given the maximum of each block of 64. The row must have no
// NaN or +inf.
void append_best(const float * x, int64_t n, int64_t k, const Maxima & maxima,
                 std::vector<Candidate> & out);
// Appends all values of at least `bound`, best first. The row must have no NaN or +inf.
void append_from(const float * x, int64_t n, float bound, const Maxima & maxima,
                 std::vector<Candidate> & out);

} // namespace dfl
