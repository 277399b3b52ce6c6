#include "speculative/node_selection.h"

#include <algorithm>
#include <cmath>

namespace dfl {

void BestSize::add(double chance, bool counts) {
    ++n_;
    tokens_ += chance;
    if (at_ < n_sizes_ && n_ == size_t(sizes_[at_])) {
        const double value = tokens_ - prices_[at_++];
        if (counts && value > value_) {
            value_ = value;
            best_ = n_;
        }
    }
}

bool BestSize::can_bring(double tokens, double chance) const {
    for (size_t at = at_; at < n_sizes_; ++at) {
        const double more = chance * double(size_t(sizes_[at]) - n_);
        if (tokens_ + more - prices_[at] > tokens) {
            return true;
        }
    }
    return false;
}

void Pick::add(double chance, bool is_chain, bool is_tree) {
    if (is_chain) {
        chains_.add(chance);
    }
    if (is_tree) {
        n_beside_ += is_chain ? 0 : 1;
        trees_.add(chance, n_beside_ > 0);
    }
}

bool Pick::is_open(double chance) const {
    const double value = std::max(chains_.value(), trees_.value());
    return all_ || chains_.can_bring(value, chance) || trees_.can_bring(value, chance);
}

bool Pick::is_tree() const {
    return all_ ? n_beside_ > 0 : trees_.best() > 0 && trees_.value() > chains_.value();
}

size_t Pick::n() const {
    const BestSize & chosen = is_tree() ? trees_ : chains_;
    return all_ ? chosen.n() : chosen.best();
}

Picked pick(const std::vector<PickTree> & trees, const Worth & worth, double trust, double least) {
    struct Candidate {
        double log_chance;
        size_t tree;
        bool is_chain, is_tree;
    };
    std::vector<Candidate> candidates;
    for (size_t t = 0; t < trees.size(); ++t) {
        const PickTree & tree = trees[t];
        size_t end = 0, n_chain = 0;
        for (size_t node = 1; node < tree.n; ++node) {
            const bool is_next = size_t(tree.parents[node]) == end;
            if (is_next) {
                end = node;
                ++n_chain;
            }
            const bool is_chain = is_next && n_chain <= tree.most, is_tree = node <= tree.most;
            if (is_chain || is_tree) {
                candidates.push_back({tree.log_chances[node], t, is_chain, is_tree});
            }
        }
    }
    // An earlier tree's first on ties.
    std::stable_sort(
        candidates.begin(), candidates.end(),
        [](const Candidate & a, const Candidate & b) { return a.log_chance > b.log_chance; });
    Pick best(worth, least);
    for (const Candidate & candidate : candidates) {
        best.add(trust * std::exp(candidate.log_chance), candidate.is_chain, candidate.is_tree);
    }
    Picked picked{std::vector<int32_t>(trees.size(), 0), best.is_tree(), best.value()};
    size_t left = best.n();
    for (const Candidate & candidate : candidates) {
        if (left > 0 && (picked.is_tree ? candidate.is_tree : candidate.is_chain)) {
            ++picked.n_nodes[candidate.tree];
            --left;
        }
    }
    return picked;
}

} // namespace dfl
