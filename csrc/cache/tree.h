// Candidates of one verify as a tree. Node 0, the root, is a sampled token that is not appended
// yet. Parents come before their children; in a chain, parent = node - 1.
#pragma once

#include <cstdint>
#include <vector>

namespace dfl {

class Tree {
  public:
    Tree() = default;
    // parents: NULL for a chain. Throws DFL_STATUS_ARGUMENT naming the node unless parents[0] is -1
    // and every other parent comes before its node.
    Tree(const int32_t * tokens, const int32_t * parents, int64_t n);

    int64_t size() const { return static_cast<int64_t>(tokens_.size()); }
    bool is_chain() const { return is_chain_; }
    int32_t token(int64_t node) const { return tokens_[node]; }
    int32_t parent(int64_t node) const { return parents_[node]; }
    int32_t depth(int64_t node) const { return depths_[node]; }

    // Returns the child of a node that has the given token, or -1.
    int64_t child(int64_t node, int32_t token) const;

    // Throws DFL_STATUS_ARGUMENT unless the n nodes are a path down from the root.
    void check_path(const int32_t * nodes, int64_t n) const;

  private:
    std::vector<int32_t> tokens_, parents_, depths_;
    bool is_chain_ = true;
};

} // namespace dfl
