#include "cache/tree.h"

#include "error.h"

#include <algorithm>

namespace dfl {

Tree::Tree(const int32_t * tokens, const int32_t * parents, int64_t n)
    : tokens_(tokens, tokens + n), parents_(n), depths_(n) {
    for (int64_t i = 0; i < n; ++i) {
        const int64_t parent = parents != nullptr ? parents[i] : i - 1;
        DFL_CHECK(i > 0 || parent == -1, DFL_STATUS_ARGUMENT,
                  "the parent of the root is %lld, expected -1", (long long)parent);
        DFL_CHECK(i == 0 || (parent >= 0 && parent < i), DFL_STATUS_ARGUMENT,
                  "the parent of node %lld is %lld, expected 0 to %lld", (long long)i,
                  (long long)parent, (long long)i - 1);
        parents_[i] = static_cast<int32_t>(parent);
        depths_[i] = i == 0 ? 0 : depths_[parent] + 1;
        is_chain_ = is_chain_ && parent == i - 1;
    }
}

int64_t Tree::child(int64_t node, int32_t token) const {
    for (int64_t i = is_chain_ ? std::min(size(), node + 2) : size(); --i > node;) {
        if (parents_[i] == node && tokens_[i] == token) {
            return i;
        }
    }
    return -1;
}

void Tree::check_path(const int32_t * nodes, int64_t n) const {
    for (int64_t i = 0; i < n; ++i) {
        DFL_CHECK(nodes[i] >= 0 && nodes[i] < size(), DFL_STATUS_ARGUMENT,
                  "the path has node %d, the pending verify has nodes 0 to %lld", nodes[i],
                  (long long)size() - 1);
        DFL_CHECK(i > 0 || nodes[i] == 0, DFL_STATUS_ARGUMENT,
                  "the path begins with node %d, expected the root", nodes[i]);
        DFL_CHECK(i == 0 || parent(nodes[i]) == nodes[i - 1], DFL_STATUS_ARGUMENT,
                  "the path goes from node %d to node %d, whose parent is %d", nodes[i - 1],
                  nodes[i], parent(nodes[i]));
    }
}

} // namespace dfl
