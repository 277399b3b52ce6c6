// Functions of the C ABI for node selection, suffix index and calibration.
#include "api/handles.h"
#include "speculative/calibration.h"
#include "speculative/node_selection.h"
#include "speculative/suffix_index.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

using dfl::CalibrationParams;
using dfl::guard;
using dfl::need;
using dfl::SuffixIndex;

struct dfl_suffix_index {
    std::shared_ptr<const dfl::Drafter> drafter; // has the n-gram table that the index reads
    SuffixIndex index;
};

static void need_tokens(const int32_t * tokens, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        DFL_CHECK(tokens[i] >= 0, DFL_STATUS_ARGUMENT, "token id %d is below 0", tokens[i]);
    }
}

static_assert(DFL_SUFFIX_OUTCOMES == SuffixIndex::N_LENGTHS * SuffixIndex::N_KINDS);

dfl_status dfl_suffix_index_create(int64_t max_tokens, const dfl_drafter * ngrams,
                                   dfl_suffix_index ** index, dfl_error * err) {
    return guard(err, [&] {
        need(index);
        // Limits max_tokens because int32_t numbers the automaton's edges, up to 3 per token.
        constexpr int64_t limit = std::numeric_limits<int32_t>::max() / 4;
        DFL_CHECK(max_tokens >= 2 && max_tokens <= limit, DFL_STATUS_ARGUMENT,
                  "max_tokens is %lld, must be 2 to %lld", static_cast<long long>(max_tokens),
                  static_cast<long long>(limit));
        const auto drafter = ngrams != nullptr ? ngrams->drafter : nullptr;
        const dfl::NgramTable * table = drafter ? drafter->weights().ngrams.get() : nullptr;
        DFL_CHECK(ngrams == nullptr || table != nullptr, DFL_STATUS_ARGUMENT,
                  "the drafter is of kind \"%s\", expected \"ngram\"", drafter->kind().name);
        *index = new dfl_suffix_index{drafter, SuffixIndex(static_cast<size_t>(max_tokens), table)};
    });
}

void dfl_suffix_index_free(dfl_suffix_index * index) { delete index; }

dfl_status dfl_suffix_index_append(dfl_suffix_index * index, const int32_t * tokens, int64_t n,
                                   int32_t is_generated, int64_t * length, dfl_error * err) {
    return guard(err, [&] {
        need(index, tokens);
        need_tokens(tokens, n);
        index->index.append(tokens, static_cast<size_t>(std::max<int64_t>(n, 0)),
                            is_generated != 0);
        if (length != nullptr) {
            *length = index->index.match_length();
        }
    });
}

dfl_status dfl_suffix_index_separate(dfl_suffix_index * index, dfl_error * err) {
    return guard(err, [&] {
        need(index);
        index->index.separate();
    });
}

static dfl::BreakEven break_even_of(const dfl_break_even & break_even) {
    DFL_CHECK(break_even.n >= 0, DFL_STATUS_ARGUMENT, "break_even has %d sizes, expected 0 or more",
              break_even.n);
    if (break_even.n > 0) {
        need(break_even.sizes, break_even.chains, break_even.trees);
    }
    int32_t before = 0;
    for (int32_t i = 0; i < break_even.n; before = break_even.sizes[i++]) {
        DFL_CHECK(break_even.sizes[i] > before, DFL_STATUS_ARGUMENT,
                  "break_even has size %d after size %d, sizes must rise from 1 on",
                  break_even.sizes[i], before);
    }
    return {break_even.sizes, break_even.chains, break_even.trees, size_t(break_even.n)};
}

dfl_status dfl_suffix_index_propose(dfl_suffix_index * const * index, int32_t n,
                                    const int32_t * tokens, const int32_t * counts,
                                    const dfl_break_even * break_even, int32_t * out_tokens,
                                    int32_t * out_parents, int32_t * out_depths,
                                    double * out_log_probs, int32_t * n_nodes, dfl_error * err) {
    return guard(err, [&] {
        need(index, tokens, counts, break_even);
        need(out_tokens, out_parents, out_depths);
        need(out_log_probs, n_nodes);
        int64_t n_tokens = 0;
        for (int32_t i = 0; i < n; ++i) {
            need(index[i]);
            for (int32_t k = 0; k < 3; ++k) {
                DFL_CHECK(counts[k * n + i] >= 0, DFL_STATUS_ARGUMENT,
                          "text %d: a number of tokens or nodes is %d, expected 0 or more", i,
                          counts[k * n + i]);
            }
            n_tokens += counts[i];
        }
        need_tokens(tokens, n_tokens);
        const dfl::BreakEven thresholds = break_even_of(*break_even);
        std::vector<SuffixIndex::Query> queries;
        for (int32_t i = 0; i < n; ++i) {
            index[i]->index.append(tokens, size_t(counts[i]), true);
            tokens += counts[i];
            queries.push_back({&index[i]->index, size_t(counts[n + i]), size_t(counts[2 * n + i])});
        }
        for (const std::vector<SuffixIndex::Node> & tree :
             SuffixIndex::propose(queries, thresholds)) {
            *n_nodes++ = int32_t(tree.size());
            for (const SuffixIndex::Node & node : tree) {
                *out_tokens++ = node.token;
                *out_parents++ = node.parent;
                *out_depths++ = node.depth;
                *out_log_probs++ = node.log_prob;
            }
        }
    });
}

dfl_status dfl_select_nodes(int32_t n, const int32_t * counts, const int32_t * parents,
                            const double * log_probs, const dfl_break_even * break_even,
                            double min_value, int32_t * n_nodes, int32_t * is_tree, double * value,
                            dfl_error * err) {
    return guard(err, [&] {
        need(counts, parents, log_probs, break_even);
        need(n_nodes, is_tree, value);
        std::vector<dfl::CandidateTree> trees;
        for (int32_t i = 0; i < n; ++i) {
            const int32_t n_all = counts[i], limit = counts[n + i];
            DFL_CHECK(n_all >= 1 && limit >= 0, DFL_STATUS_ARGUMENT,
                      "tree %d has %d nodes and a limit of %d, expected at least 1 and 0", i, n_all,
                      limit);
            trees.push_back({parents, log_probs, size_t(n_all), size_t(limit)});
            parents += n_all;
            log_probs += n_all;
        }
        const dfl::Selection selection =
            dfl::select_nodes(trees, break_even_of(*break_even), min_value);
        std::copy(selection.n_nodes.begin(), selection.n_nodes.end(), n_nodes);
        *is_tree = selection.is_tree;
        *value = selection.value;
    });
}

dfl_status dfl_suffix_index_get_outcomes(const dfl_suffix_index * index, double * outcomes,
                                         dfl_error * err) {
    return guard(err, [&] {
        need(index, outcomes);
        for (const SuffixIndex::Outcome & outcome : index->index.outcomes()) {
            *outcomes++ = outcome.tried;
            *outcomes++ = outcome.accepted;
        }
    });
}

dfl_status dfl_suffix_index_set_outcomes(dfl_suffix_index * index, const double * outcomes,
                                         dfl_error * err) {
    return guard(err, [&] {
        need(index, outcomes);
        SuffixIndex::Outcomes parsed;
        for (size_t i = 0; i < parsed.size(); ++i) {
            parsed[i] = {outcomes[2 * i], outcomes[2 * i + 1]};
            DFL_CHECK(parsed[i].accepted > 0.0 && parsed[i].accepted <= parsed[i].tried &&
                          parsed[i].tried < 1e9,
                      DFL_STATUS_ARGUMENT,
                      "outcomes: %g of %g candidates were accepted, expected 0 < accepted <= tried",
                      parsed[i].accepted, parsed[i].tried);
        }
        index->index.set_outcomes(parsed);
    });
}

int64_t dfl_suffix_index_size(const dfl_suffix_index * index) {
    return index != nullptr ? static_cast<int64_t>(index->index.size()) : -1;
}

uint64_t dfl_suffix_index_bytes(const dfl_suffix_index * index) {
    return index != nullptr ? index->index.bytes() : 0;
}

static_assert(DFL_CALIBRATION_SIZE == CalibrationParams::N);

dfl_status dfl_calibration_update(const dfl_calibration_params * params, double * weights,
                                  double * information, int64_t n_depths, const double * gradients,
                                  const double * curvatures, const int64_t * counts, int64_t n,
                                  dfl_error * err) {
    return guard(err, [&] {
        need(params, weights, information, gradients, curvatures, counts);
        for (int64_t i = 0; i < n; ++i) {
            DFL_CHECK(counts[i] >= 0 && counts[i] <= n_depths, DFL_STATUS_ARGUMENT,
                      "an outcome has %lld depths, expected 0 to n_depths = %lld",
                      static_cast<long long>(counts[i]), static_cast<long long>(n_depths));
        }
        const CalibrationParams checked = {params->prior, params->precision, params->pull,
                                           params->lower, params->upper,     params->forgetting};
        for (int64_t i = 0; i < n; ++i) {
            dfl::calibration_step(checked, counts[i], weights, information, gradients, curvatures);
            gradients += counts[i] * CalibrationParams::N;
            curvatures += counts[i] * CalibrationParams::N * CalibrationParams::N;
        }
    });
}
