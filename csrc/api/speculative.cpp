// extern "C" bodies only: copies, what of candidates is verified, what calibrations learn by.
#include "api/handles.h"
#include "speculative/calibration.h"
#include "speculative/node_selection.h"
#include "speculative/suffix_index.h"

#include <algorithm>
#include <limits>
#include <vector>

using dfl::Copies;
using dfl::guard;
using dfl::need;
using dfl::NewtonRules;

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

static dfl::Worth worth_of(const dfl_worth & worth) {
    DFL_CHECK(worth.n >= 0, DFL_STATUS_ARGUMENT, "%d sizes, must be 0 at least", worth.n);
    if (worth.n > 0) {
        need(worth.sizes, worth.chains, worth.trees);
    }
    int32_t before = 0;
    for (int32_t i = 0; i < worth.n; before = worth.sizes[i++]) {
        DFL_CHECK(worth.sizes[i] > before, DFL_STATUS_ARGUMENT,
                  "size %d after size %d, sizes must rise from 1 on", worth.sizes[i], before);
    }
    return {worth.sizes, worth.chains, worth.trees, size_t(worth.n)};
}

dfl_status dfl_copies_propose(dfl_copies * const * copies, int32_t n, const int32_t * tokens,
                              const int32_t * counts, const dfl_worth * worth, int32_t * out_tokens,
                              int32_t * out_parents, int32_t * out_depths, double * out_log_chances,
                              int32_t * n_nodes, dfl_error * err) {
    return guard(err, [&] {
        need(copies, tokens, counts, worth);
        need(out_tokens, out_parents, out_depths);
        need(out_log_chances, n_nodes);
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
        const dfl::Worth least = worth_of(*worth);
        std::vector<Copies::Asked> asked;
        for (int32_t i = 0; i < n; ++i) {
            copies[i]->copies.append(tokens, size_t(counts[i]), true);
            tokens += counts[i];
            asked.push_back({&copies[i]->copies, size_t(counts[n + i]), size_t(counts[2 * n + i])});
        }
        for (const std::vector<Copies::Node> & tree : Copies::propose(asked, least)) {
            *n_nodes++ = int32_t(tree.size());
            for (const Copies::Node & node : tree) {
                *out_tokens++ = node.token;
                *out_parents++ = node.parent;
                *out_depths++ = node.depth;
                *out_log_chances++ = node.log_chance;
            }
        }
    });
}

dfl_status dfl_pick(int32_t n, const int32_t * counts, const int32_t * parents,
                    const double * log_chances, const dfl_worth * worth, double trust, double least,
                    int32_t * n_nodes, int32_t * is_tree, double * value, dfl_error * err) {
    return guard(err, [&] {
        need(counts, parents, log_chances, worth);
        need(n_nodes, is_tree, value);
        std::vector<dfl::PickTree> trees;
        for (int32_t i = 0; i < n; ++i) {
            const int32_t n_all = counts[i], most = counts[n + i];
            DFL_CHECK(n_all >= 1 && most >= 0, DFL_STATUS_ARGUMENT,
                      "tree %d of %d nodes, %d at most, must be 1 and 0 at least", i, n_all, most);
            trees.push_back({parents, log_chances, size_t(n_all), size_t(most)});
            parents += n_all;
            log_chances += n_all;
        }
        const dfl::Picked picked = dfl::pick(trees, worth_of(*worth), trust, least);
        std::copy(picked.n_nodes.begin(), picked.n_nodes.end(), n_nodes);
        *is_tree = picked.is_tree;
        *value = picked.value;
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

static_assert(DFL_NEWTON_SIZE == NewtonRules::N);

dfl_status dfl_newton_steps(const dfl_newton_rules * rules, double * weights, double * information,
                            int64_t n_depths, const double * slopes, const double * spreads,
                            const int64_t * counts, int64_t n, dfl_error * err) {
    return guard(err, [&] {
        need(rules, weights, information, slopes, spreads, counts);
        for (int64_t i = 0; i < n; ++i) {
            DFL_CHECK(counts[i] >= 0 && counts[i] <= n_depths, DFL_STATUS_ARGUMENT,
                      "outcomes at %lld depths, there are %lld", static_cast<long long>(counts[i]),
                      static_cast<long long>(n_depths));
        }
        const NewtonRules of = {rules->prior, rules->held, rules->back,
                                rules->low,   rules->high, rules->fade};
        for (int64_t i = 0; i < n; ++i) {
            dfl::newton_step(of, counts[i], weights, information, slopes, spreads);
            slopes += counts[i] * NewtonRules::N;
            spreads += counts[i] * NewtonRules::N * NewtonRules::N;
        }
    });
}
