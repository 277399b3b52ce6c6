"""Draft trees: which candidates a round verifies, best-first over the chances of their paths.

A drafter gives candidates for each of the coming positions, whatever stands before them: so every
sequence of candidates is a node, and its chance is the product of theirs. `grow` takes the likeliest
nodes one after the other; a node's parent is likelier than the node, so it comes first, and the
first nodes of a tree are themselves the best tree of their number.

Source: Ringel & Romano, DDTree, arXiv 2604.12989.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Candidates:
    """What may follow the last token, position by position.

    tokens: integers [n, k], distinct within a row.
    log_chances: float64 [n, k], at most 0, falling within a row: the log of the chance that the
        target takes the token, given that it took the path before it. -inf: not a candidate.
    """

    tokens: NDArray[np.integer[Any]]
    log_chances: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Tree:
    """Nodes to verify, parents before children. Node 0 is the root: the token chosen last.

    tokens, parents, depths, log_chances: [n]; the root has parent -1, depth 0 and chance 1.
    log_chances: of the whole path from the root to the node.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    log_chances: list[float]
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, tokens: Sequence[int], parents: Sequence[int] | None = None) -> Tree:
        """A tree of these nodes, a chain without parents; all chances are 1."""
        parents = range(-1, len(tokens) - 1) if parents is None else parents
        depths: list[int] = []
        for parent in parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return cls(list(tokens), list(parents), depths, [0.0] * len(tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def n_drafted(self) -> int:
        """Nodes below the root."""
        return len(self.tokens) - 1

    @property
    def is_chain(self) -> bool:
        """Whether every node follows the one before it."""
        return self.depths[-1] == self.n_drafted

    @property
    def n_expected(self) -> float:
        """Nodes that the target is expected to accept."""
        return sum(map(math.exp, self.log_chances)) - 1.0

    def child(self, node: int, token: int) -> int | None:
        """The child of a node that is this token, None if there is none."""
        if self.is_chain:
            below = node + 1
            return below if below < len(self.tokens) and self.tokens[below] == token else None
        if not self._children:
            keys = zip(self.parents, self.tokens, strict=True)
            self._children.update({key: child for child, key in enumerate(keys)})
        return self._children.get((node, token))

    def follow(
        self, choose: Callable[[int], int], take: Callable[[int], bool]
    ) -> tuple[list[int], int]:
        """The path of nodes that the target takes, root first, and how many candidates it took.

        choose: the target's token after a node. take: is given each of these tokens; True ends the
        path before the token, which counts as taken all the same if it is a candidate.
        """
        path, n_taken = [0], 0
        while True:
            token = choose(path[-1])
            node = self.child(path[-1], token)
            n_taken += node is not None
            if take(token) or node is None:
                return path, n_taken
            path.append(node)

    def accepted(self, chosen: Iterable[int]) -> list[int]:
        """The path that the target takes, root first.

        chosen: its token after each node of the path, taken only as far as the path goes.
        """
        tokens = iter(chosen)
        return self.follow(lambda _: next(tokens, -1), lambda _: False)[0]

    def first(self, n_drafted: int) -> Tree:
        """The root and the first nodes below it, which are a tree as well."""
        n = n_drafted + 1
        if n >= len(self):
            return self
        return Tree(self.tokens[:n], self.parents[:n], self.depths[:n], self.log_chances[:n])


def chain(root: int, candidates: Candidates, length: int) -> Tree:
    """The best candidate of each of the first `length` positions, up to one that has none."""
    ids, steps = candidates.tokens[:length, 0].tolist(), candidates.log_chances[:length, 0].tolist()
    tokens, paths = [root], [0.0]
    for token, step in zip(ids, steps, strict=True):
        if step == -math.inf:
            break
        tokens.append(token)
        paths.append(paths[-1] + step)
    n = len(tokens)
    return Tree(tokens, list(range(-1, n - 1)), list(range(n)), paths)


def grow(root: int, candidates: Candidates, budget: int, *, spine: bool = False) -> Tree:
    """The `budget` likeliest nodes below the root; fewer if there are no more.

    spine: the chain of best candidates comes first, whole, and the likeliest of the rest after it.
    """
    ids, steps = candidates.tokens.tolist(), candidates.log_chances.tolist()
    n, k = candidates.tokens.shape
    tree = chain(root, candidates, budget if spine else 0)
    tokens, parents, depths, paths = tree.tokens, tree.parents, tree.depths, tree.log_chances
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
