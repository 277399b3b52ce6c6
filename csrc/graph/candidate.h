// A token of a row of logits.
#pragma once

#include <cstdint>

namespace dfl {

// A token and its raw logit.
struct Candidate {
    int32_t token;
    float logit;
};

} // namespace dfl
