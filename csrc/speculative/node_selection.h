// Selects the nodes to verify for several sequences: as many as bring more tokens than they cost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dfl {

// Expected accepted tokens at which a pass breaks even, by its number of verified nodes: sizes [n],
// in rising order, and thresholds [n] for chains and for trees, since some layers take longer for a
// tree of any size. n = 0: no threshold.
struct BreakEven {
    const int32_t * sizes;
    const double *chains, *trees;
    size_t n;
};

// Finds the most profitable number of nodes, while nodes are added in order of probability.
class BestSize {
  public:
    BestSize(const int32_t * sizes, const double * costs, size_t n, double min_value)
        : sizes_(sizes), costs_(costs), n_sizes_(n), value_(min_value) {}

    // Adds a node of this probability. counts: false if a selection must not end with it.
    void add(double prob, bool counts = true);
    // True if further nodes of at most probability `prob` can bring a gain above `tokens`.
    bool can_exceed(double tokens, double prob) const;

    // Return the number of added nodes; the most profitable number of nodes, or 0 if none gains
    // more than min_value; and its gain, or min_value.
    size_t n() const { return n_; }
    size_t best() const { return best_; }
    double value() const { return value_; }

  private:
    const int32_t * sizes_;
    const double * costs_;
    size_t n_sizes_, at_ = 0, n_ = 0, best_ = 0;
    double tokens_ = 0.0, value_;
};

// Chooses the best number of nodes of all trees, or of all most probable chains of the trees.
class NodeSelector {
  public:
    NodeSelector(const BreakEven & break_even, double min_value)
        : takes_all_(break_even.n == 0),
          chains_(break_even.sizes, break_even.chains, break_even.n, min_value),
          trees_(break_even.sizes, break_even.trees, break_even.n, min_value) {}

    // Adds the next most probable node. is_chain: the node is on the most probable chain of its
    // tree; is_tree: the node is within max_nodes of its tree.
    void add(double prob, bool is_chain, bool is_tree = true);
    // True if nodes of at most this probability may change the selection.
    bool can_improve(double prob) const;
    bool is_tree() const;
    // Returns the number of selected nodes; value() returns their gain in expected tokens.
    size_t n() const;
    double value() const { return is_tree() ? trees_.value() : chains_.value(); }

  private:
    bool takes_all_;
    size_t n_off_chain_ = 0;
    BestSize chains_, trees_;
};

// Candidates of one sequence: parents and log-probabilities of paths, [n] with the root, children
// after parents and most probable first. max_nodes: limit of verified nodes below the root.
struct CandidateTree {
    const int32_t * parents;
    const double * log_probs;
    size_t n, max_nodes;
};

// Result of select_nodes: number of nodes to verify of each tree (of its most probable chain unless
// is_tree), and their gain in expected tokens.
struct Selection {
    std::vector<int32_t> n_nodes;
    bool is_tree = false;
    double value = 0.0;
};

Selection select_nodes(const std::vector<CandidateTree> & trees, const BreakEven & break_even,
                       double min_value);

} // namespace dfl
