// Picking the best of a row of logits on the host.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace dfl {

// A token and its raw logit.
struct Candidate {
    int32_t token;
    float logit;
};

// Larger logit first, lower token first on ties. NaNs come last: an order that they break would let
// std::sort leave its range.
inline bool is_better(const Candidate & a, const Candidate & b) {
    if (std::isnan(a.logit) || std::isnan(b.logit)) {
        return std::isnan(b.logit) && !std::isnan(a.logit);
    }
    return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
}

// Index of the first largest of n values; n if there is none, as among NaNs.
int64_t first_largest(const float * x, int64_t n);

// Appends the k largest of n values, best first, lower index first on ties; k is at most n.
void append_best(const float * x, int64_t n, int64_t k, std::vector<Candidate> & out);

} // namespace dfl
