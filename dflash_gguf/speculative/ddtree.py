"""Trees of drafters that give candidates for each of the coming positions, whatever stands before.

Every sequence of candidates is then a node, and its chance is the product of theirs.
`best_first_tree` takes the likeliest nodes one after the other; a node's parent is likelier than
the node, so it comes first.

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
    """What may follow the last token, position by position.

    tokens: integers [n, k], distinct within a row.
    log_probs: float64 [n, k], at most 0, falling within a row: the log of the chance that the
        target takes the token, given that it took the path before it. -inf: not a candidate.
    """

    tokens: NDArray[np.integer[Any]]
    log_probs: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.tokens)


def chain(root: int, candidates: PositionCandidates, length: int) -> Tree:
    """The best candidate of each of the first `length` positions, up to one that has none."""
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
    """The `budget` likeliest nodes below the root; fewer if there are no more.

    main_chain: the chain of best candidates comes first, whole, then the likeliest of the rest.
    """
    ids, steps = candidates.tokens.tolist(), candidates.log_probs.tolist()
    n, k = candidates.tokens.shape
    tree = chain(root, candidates, budget if main_chain else 0)
    tokens, parents, depths, paths = tree.tokens, tree.parents, tree.depths, tree.log_probs
    # Entries: minus the path's log-chance, the earlier one on ties, parent, rank among siblings.
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
