"""Best-first candidate trees (DDTree) of drafters that give candidates for each position.

The candidates of a position do not depend on the tokens before it, so any sequence of candidates is
a path, whose probability is the product of its candidates' probabilities. `best_first_tree` adds
the most probable nodes one by one; a parent is more probable than its children, so it comes first.

Source: Ringel & Romano, DDTree, arXiv 2604.12989.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .tree import Tree


@dataclass(frozen=True, slots=True)
class PositionCandidates:
    """Candidates for each of the next n positions, k a position, most probable first.

    tokens: integers [n, k], distinct within a row. log_probs: float64 [n, k], log-probabilities
    that the target accepts a token after the path before it; -inf: no candidate.
    """

    tokens: NDArray[np.integer[Any]]
    log_probs: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.tokens)


def chain(root: int, candidates: PositionCandidates, length: int) -> Tree:
    """Returns the chain of the best candidates of at most the first `length` positions."""
    ids, steps = candidates.tokens[:length, 0].tolist(), candidates.log_probs[:length, 0].tolist()
    tokens, paths = [root], [0.0]
    for token, step in zip(ids, steps, strict=True):
        if step == -math.inf:
            break
        tokens.append(token)
        paths.append(paths[-1] + step)
    return Tree.chain(tokens, paths)


def best_first_tree(
    root: int, candidates: PositionCandidates, budget: int, *, main_chain: bool = False
) -> Tree:
    """Returns a tree of the `budget` best nodes; main_chain: with the whole main chain first."""
    ids, steps = candidates.tokens.tolist(), candidates.log_probs.tolist()
    n, k = candidates.tokens.shape
    tree = chain(root, candidates, budget if main_chain else 0)
    tokens, parents, depths, paths = tree.tokens, tree.parents, tree.depths, tree.log_probs
    # Heap entries: minus the path's log-probability, insertion order (for ties), parent, rank.
    heap: list[tuple[float, int, int, int]] = []
    for node in range(len(tokens)):
        rank = 0 if node == tree.n_drafted else 1
        if depths[node] < n and rank < k:
            heappush(heap, (-paths[node] - steps[depths[node]][rank], node, node, rank))
    n_pushed = len(tokens)
    while heap and len(tokens) <= budget:
        cost, _, parent, rank = heappop(heap)
        if cost == math.inf:
            break
        depth, node = depths[parent], len(tokens)
        tokens.append(ids[depth][rank])
        parents.append(parent)
        depths.append(depth + 1)
        paths.append(-cost)
        if rank + 1 < k:
            n_pushed += 1
            sibling = -paths[parent] - steps[depth][rank + 1]
            heappush(heap, (sibling, n_pushed, parent, rank + 1))
        if depth + 1 < n:
            n_pushed += 1
            heappush(heap, (cost - steps[depth + 1][0], n_pushed, node, 0))
    return tree
