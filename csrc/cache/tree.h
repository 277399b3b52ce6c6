// The candidates of one verify. Node 0 is the root: chosen already, not appended yet. A node's
// parent comes before it; a chain is the case parent = i - 1.
#pragma once

#include <cstdint>
#include <vector>

namespace dfl {

class Tree {
  public:
    Tree() = default; // no nodes
    // parents: NULL for a chain. Throws DFL_STATUS_ARGUMENT naming the node unless parents[0] is -1
    // and every other parent comes before its node.
    Tree(const int32_t * tokens, const int32_t * parents, int64_t n);

    int64_t size() const { return static_cast<int64_t>(tokens_.size()); }
    bool is_chain() const { return is_chain_; }
    int32_t token(int64_t node) const { return tokens_[node]; }
    int32_t parent(int64_t node) const { return parents_[node]; }
    // Steps below the root.
    int32_t depth(int64_t node) const { return depths_[node]; }

    // The child of a node that is a token, -1 if there is none.
    int64_t child(int64_t node, int32_t token) const;

    // Throws DFL_STATUS_ARGUMENT unless the nodes go down from the root, each a child of the one
    // before.
    void check_path(const int32_t * nodes, int64_t n) const;

  private:
    std::vector<int32_t> tokens_, parents_, depths_;
    bool is_chain_ = true;
};

} // namespace dfl
