// Of several texts' candidates those that are worth a pass: as many as bring more than they cost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dfl {

// Tokens that a pass must bring for each of n sizes: the number of its candidates, in rising order.
// Some layers take longer for trees, whatever their size. Without sizes all are wanted.
struct Worth {
    const int32_t * sizes;
    const double *chains, *trees;
    size_t n;
};

// The best size among candidates that come likeliest first.
class BestSize {
  public:
    // Sizes must bring more than `least` beyond what they cost.
    BestSize(const int32_t * sizes, const double * prices, size_t n, double least)
        : sizes_(sizes), prices_(prices), n_sizes_(n), value_(least) {}

    // counts: whether a pass of as many as there are then may be taken.
    void add(double chance, bool counts = true);
    // Whether further candidates, of this chance at most, can bring more than so many tokens.
    bool can_bring(double tokens, double chance) const;

    // That were added; of the best size so far, 0 if there is none; what that brings, or `least`.
    size_t n() const { return n_; }
    size_t best() const { return best_; }
    double value() const { return value_; }

  private:
    const int32_t * sizes_;
    const double * prices_;
    size_t n_sizes_, at_ = 0, n_ = 0, best_ = 0;
    double tokens_ = 0.0, value_;
};

// The same for candidates that are trees: as many of them, or of those on each tree's likeliest
// chain.
class Pick {
  public:
    Pick(const Worth & worth, double least)
        : all_(worth.n == 0), chains_(worth.sizes, worth.chains, worth.n, least),
          trees_(worth.sizes, worth.trees, worth.n, least) {}

    // The next one; is_chain: whether it is on the likeliest chain, is_tree: whether trees have it.
    void add(double chance, bool is_chain, bool is_tree = true);
    // Whether it may still change with candidates of this chance at most.
    bool is_open(double chance) const;
    // What is no more than chains is chosen as such.
    bool is_tree() const;
    // How many are chosen, and the tokens that they bring beyond what they cost.
    size_t n() const;
    double value() const { return is_tree() ? trees_.value() : chains_.value(); }

  private:
    bool all_;
    size_t n_beside_ = 0; // of trees, beside their chains
    BestSize chains_, trees_;
};

// A tree of candidates: parents and log-chances of paths, [n] with the root, children after their
// parents and likeliest first; so many of them at most.
struct PickTree {
    const int32_t * parents;
    const double * log_chances;
    size_t n, most;
};

// What is verified of each tree: the first nodes of it, or of its likeliest chain.
struct Picked {
    std::vector<int32_t> n_nodes;
    bool is_tree = false;
    double value = 0.0;
};

// trust: what comes true of chances.
Picked pick(const std::vector<PickTree> & trees, const Worth & worth, double trust, double least);

} // namespace dfl
