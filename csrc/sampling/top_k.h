// The largest logits of a row, found by the CPU.
#pragma once

#include "graph/candidate.h"

#include <cmath>
#include <cstdint>
#include <vector>

namespace dfl {

// Larger logit first, lower token first on ties. NaNs come last: an order that they break would let
// std::sort leave its range.
inline bool is_better(const Candidate & a, const Candidate & b) {
    if (std::isnan(a.logit) || std::isnan(b.logit)) {
        return std::isnan(b.logit) && !std::isnan(a.logit);
    }
    return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
}

// Whether no value is a NaN or +inf: a row may ban tokens by -inf.
bool all_finite(const float * logits, int64_t n);

// Index of the first largest of n values; n if there is none, as among NaNs.
int64_t first_largest(const float * x, int64_t n);

// The largest value of each block of a row, by which the rest of it need not be looked at.
struct Maxima {
    std::vector<float> of_blocks; // minus infinity among NaNs
    bool is_finite;               // no value is a NaN or +inf

    Maxima(const float * x, int64_t n);
    float largest() const;
};

// Appends the k largest of n values, best first, lower index first on ties; k is at most n.
void append_best(const float * x, int64_t n, int64_t k, std::vector<Candidate> & out);
// The same of a sound row whose maxima are known.
void append_best(const float * x, int64_t n, int64_t k, const Maxima & maxima,
                 std::vector<Candidate> & out);
// Appends the values of a sound row that are not below a bound, in the same order.
void append_from(const float * x, int64_t n, float bound, const Maxima & maxima,
                 std::vector<Candidate> & out);

} // namespace dfl
