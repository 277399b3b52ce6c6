// extern "C" bodies only: copies.
#include "draft/copies.h"
#include "api/handles.h"

#include <algorithm>
#include <limits>
#include <vector>

using dfl::Copies;
using dfl::guard;
using dfl::need;

struct dfl_copies {
    explicit dfl_copies(size_t n_most) : copies(n_most) {}

    Copies copies;
};

static void need_tokens(const int32_t * tokens, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        DFL_CHECK(tokens[i] >= 0, DFL_STATUS_ARGUMENT, "token id %d is below 0", tokens[i]);
    }
}

static_assert(DFL_COPY_OUTCOMES == Copies::n_lengths * Copies::n_kinds);

dfl_status dfl_copies_create(int64_t n_most, dfl_copies ** copies, dfl_error * err) {
    return guard(err, [&] {
        need(copies);
        constexpr int64_t most = std::numeric_limits<int32_t>::max() / 4; // states and edges count
        DFL_CHECK(n_most >= 2 && n_most <= most, DFL_STATUS_ARGUMENT,
                  "n_most is %lld, must be 2 to %lld", static_cast<long long>(n_most),
                  static_cast<long long>(most));
        *copies = new dfl_copies(static_cast<size_t>(n_most));
    });
}

void dfl_copies_free(dfl_copies * copies) { delete copies; }

dfl_status dfl_copies_append(dfl_copies * copies, const int32_t * tokens, int64_t n,
                             int32_t is_chosen, int64_t * length, dfl_error * err) {
    return guard(err, [&] {
        need(copies, tokens);
        need_tokens(tokens, n);
        copies->copies.append(tokens, static_cast<size_t>(std::max<int64_t>(n, 0)), is_chosen != 0);
        if (length != nullptr) {
            *length = copies->copies.match_length();
        }
    });
}

dfl_status dfl_copies_separate(dfl_copies * copies, dfl_error * err) {
    return guard(err, [&] {
        need(copies);
        copies->copies.separate();
    });
}

dfl_status dfl_copies_propose(dfl_copies * const * copies, int32_t n, const int32_t * tokens,
                              const int32_t * counts, const int32_t * sizes, const double * least,
                              int32_t n_sizes, int32_t * out_tokens, int32_t * out_parents,
                              float * out_log_chances, int32_t * n_nodes, dfl_error * err) {
    return guard(err, [&] {
        need(copies, tokens, counts, sizes, least);
        need(out_tokens, out_parents, out_log_chances, n_nodes);
        int64_t n_tokens = 0;
        for (int32_t i = 0; i < n; ++i) {
            need(copies[i]);
            for (int32_t k = 0; k < 3; ++k) {
                DFL_CHECK(counts[k * n + i] >= 0, DFL_STATUS_ARGUMENT,
                          "text %d with a count of %d, none must be below 0", i, counts[k * n + i]);
            }
            n_tokens += counts[i];
        }
        need_tokens(tokens, n_tokens);
        size_t n_found = 0;
        for (int32_t i = 0; i < n; ++i) {
            Copies & texts = copies[i]->copies;
            texts.append(tokens, size_t(counts[i]), true);
            tokens += counts[i];
            const size_t found = texts.propose(size_t(counts[n + i]), size_t(counts[2 * n + i]),
                                               out_tokens + n_found, out_parents + n_found,
                                               out_log_chances + n_found);
            n_nodes[i] = int32_t(found);
            n_found += found;
        }
        const std::vector<float> logs(out_log_chances, out_log_chances + n_found);
        if (n_sizes > 0 && !dfl::promises(logs, sizes, least, size_t(n_sizes))) {
            std::fill(n_nodes, n_nodes + n, 0);
        }
    });
}

dfl_status dfl_copies_get_outcomes(const dfl_copies * copies, double * outcomes, dfl_error * err) {
    return guard(err, [&] {
        need(copies, outcomes);
        for (const Copies::Outcome & outcome : copies->copies.outcomes()) {
            *outcomes++ = outcome.tried;
            *outcomes++ = outcome.taken;
        }
    });
}

dfl_status dfl_copies_set_outcomes(dfl_copies * copies, const double * outcomes, dfl_error * err) {
    return guard(err, [&] {
        need(copies, outcomes);
        Copies::Outcomes found;
        for (size_t i = 0; i < found.size(); ++i) {
            found[i] = {outcomes[2 * i], outcomes[2 * i + 1]};
            DFL_CHECK(found[i].taken > 0.0 && found[i].taken <= found[i].tried &&
                          found[i].tried < 1e9,
                      DFL_STATUS_ARGUMENT, "%g copies of %g came true: need 0 < taken <= tried",
                      found[i].taken, found[i].tried);
        }
        copies->copies.set_outcomes(found);
    });
}

int64_t dfl_copies_size(const dfl_copies * copies) {
    return copies != nullptr ? static_cast<int64_t>(copies->copies.size()) : -1;
}

uint64_t dfl_copies_bytes(const dfl_copies * copies) {
    return copies != nullptr ? copies->copies.bytes() : 0;
}
