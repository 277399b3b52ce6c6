// Passes of a single sequence: prefill and verify.
#pragma once

#include "engine/sequence.h"

inline void prefill(dfl::Sequence & sequence, const int32_t * tokens, int64_t n,
                    float * all_logits = nullptr) {
    sequence.engine().run({{&sequence, false, tokens, n, nullptr, 0, all_logits}}, nullptr);
}

inline void verify(dfl::Sequence & sequence, const int32_t * tokens, const int32_t * parents,
                   int64_t n) {
    sequence.engine().run({{&sequence, true, tokens, n, parents}}, nullptr);
}

inline void commit(dfl::Sequence & sequence, const int32_t * nodes, int64_t n) {
    sequence.engine().commit({{&sequence, nodes, n}});
}
