#include "speculative/node_selection.h"

#include <algorithm>
#include <cmath>

namespace dfl {

void BestSize::add(double prob, bool counts) {
    ++n_;
    tokens_ += prob;
    if (at_ < n_sizes_ && n_ == size_t(sizes_[at_])) {
        const double value = tokens_ - costs_[at_++];
        if (counts && value > value_) {
            value_ = value;
            best_ = n_;
        }
    }
}

bool BestSize::can_exceed(double tokens, double prob) const {
    for (size_t at = at_; at < n_sizes_; ++at) {
        const double gain = prob * double(size_t(sizes_[at]) - n_);
        if (tokens_ + gain - costs_[at] > tokens) {
            return true;
        }
    }
    return false;
}

void NodeSelector::add(double prob, bool is_chain, bool is_tree) {
    if (is_chain) {
        chains_.add(prob);
    }
    if (is_tree) {
        n_off_chain_ += is_chain ? 0 : 1;
        trees_.add(prob, n_off_chain_ > 0);
    }
}

bool NodeSelector::can_improve(double prob) const {
    const double value = std::max(chains_.value(), trees_.value());
    return takes_all_ || chains_.can_exceed(value, prob) || trees_.can_exceed(value, prob);
}

bool NodeSelector::is_tree() const {
    return takes_all_ ? n_off_chain_ > 0 : trees_.best() > 0 && trees_.value() > chains_.value();
}

size_t NodeSelector::n() const {
    const BestSize & chosen = is_tree() ? trees_ : chains_;
    return takes_all_ ? chosen.n() : chosen.best();
}

Selection select_nodes(const std::vector<CandidateTree> & trees, const BreakEven & break_even,
                       double min_value) {
    struct Candidate {
        double log_prob;
        size_t tree;
        bool is_chain, is_tree;
    };
    std::vector<Candidate> candidates;
    for (size_t t = 0; t < trees.size(); ++t) {
        const CandidateTree & tree = trees[t];
        size_t end = 0, n_chain = 0;
        for (size_t node = 1; node < tree.n; ++node) {
            const bool is_next = size_t(tree.parents[node]) == end;
            if (is_next) {
                end = node;
                ++n_chain;
            }
            const bool is_chain = is_next && n_chain <= tree.max_nodes,
                       is_tree = node <= tree.max_nodes;
            if (is_chain || is_tree) {
                candidates.push_back({tree.log_probs[node], t, is_chain, is_tree});
            }
        }
    }
    // Stable sort: on ties, the node of the earlier tree comes first.
    std::stable_sort(
        candidates.begin(), candidates.end(),
        [](const Candidate & a, const Candidate & b) { return a.log_prob > b.log_prob; });
    NodeSelector best(break_even, min_value);
    for (const Candidate & candidate : candidates) {
        best.add(std::exp(candidate.log_prob), candidate.is_chain, candidate.is_tree);
    }
    Selection selection{std::vector<int32_t>(trees.size(), 0), best.is_tree(), best.value()};
    size_t n_left = best.n();
    for (const Candidate & candidate : candidates) {
        if (n_left > 0 && (selection.is_tree ? candidate.is_tree : candidate.is_chain)) {
            ++selection.n_nodes[candidate.tree];
            --n_left;
        }
    }
    return selection;
}

} // namespace dfl
