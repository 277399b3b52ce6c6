// A candidate token and its raw logit.
#pragma once

#include <cstdint>

namespace dfl {

struct Candidate {
    int32_t token;
    float logit;
};

} // namespace dfl
