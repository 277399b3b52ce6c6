// Selects the nodes to verify among the candidates of several sequences: as many as gain more
// expected tokens than verifying them costs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dfl {

// Minimum expected accepted tokens for a pass to break even, by its number of verified nodes, in
// rising order. Trees have thresholds of their own, since some layers take longer for them whatever
// their size. Without sizes there is no threshold.
struct BreakEven {
    const int32_t * sizes;
    const double *chains, *trees;
    size_t n;
};

// The number of nodes with the largest gain, among nodes that are added in order of probability.
class BestSize {
  public:
    // The gain must exceed min_value.
    BestSize(const int32_t * sizes, const double * costs, size_t n, double min_value)
        : sizes_(sizes), costs_(costs), n_sizes_(n), value_(min_value) {}

    // counts: whether a pass may have as many nodes as were added then.
    void add(double prob, bool counts = true);
    // True if further nodes of at most this probability can gain more than so many tokens.
    bool can_exceed(double tokens, double prob) const;

    // Nodes added; nodes of the best size so far, 0 if there is none; its gain, or min_value.
    size_t n() const { return n_; }
    size_t best() const { return best_; }
    double value() const { return value_; }

  private:
    const int32_t * sizes_;
    const double * costs_;
    size_t n_sizes_, at_ = 0, n_ = 0, best_ = 0;
    double tokens_ = 0.0, value_;
};

// The same for candidate trees: the best number of their nodes, or of nodes on the likeliest chain
// of each.
class NodeSelector {
  public:
    NodeSelector(const BreakEven & break_even, double min_value)
        : takes_all_(break_even.n == 0),
          chains_(break_even.sizes, break_even.chains, break_even.n, min_value),
          trees_(break_even.sizes, break_even.trees, break_even.n, min_value) {}

    // Adds the next node. is_chain: it is on its tree's likeliest chain; is_tree: its tree may have
    // it.
    void add(double prob, bool is_chain, bool is_tree = true);
    // True if nodes of at most this probability may change the selection.
    bool can_improve(double prob) const;
    // False where the selected nodes are chains.
    bool is_tree() const;
    // Nodes selected, and their gain in expected tokens.
    size_t n() const;
    double value() const { return is_tree() ? trees_.value() : chains_.value(); }

  private:
    bool takes_all_;
    size_t n_off_chain_ = 0; // nodes of trees that are not on their likeliest chains
    BestSize chains_, trees_;
};

// A tree of candidates: parents and log-probabilities of paths, [n] with the root, children after
// their parents and likeliest first. max_nodes: nodes below the root that may be verified.
struct CandidateTree {
    const int32_t * parents;
    const double * log_probs;
    size_t n, max_nodes;
};

// The number of nodes to verify of each tree, its first ones or the first of its likeliest chain.
struct Selection {
    std::vector<int32_t> n_nodes;
    bool is_tree = false;
    double value = 0.0;
};

Selection select_nodes(const std::vector<CandidateTree> & trees, const BreakEven & break_even,
                       double min_value);

} // namespace dfl
