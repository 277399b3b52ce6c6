"""Draft trees: candidate tokens to verify, with the log-probability of the path to each node.

Sorted by probability, nodes follow their parents, and the first n form the best tree of n nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tree:
    """A tree of nodes to verify, parents before children. Node 0 is the root, the last token.

    Never changed once built; a frozen dataclass takes several times as long to create. All fields
    are [n]; the root has parent -1, depth 0, log-probability 0. log_probs: of the path to a node.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    log_probs: list[float]
    _children: dict[tuple[int, int], int] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, tokens: Sequence[int], parents: Sequence[int] | None = None) -> Tree:
        """Builds a tree from tokens and parents (None: a chain), with all log-probabilities 0."""
        parents = range(-1, len(tokens) - 1) if parents is None else parents
        depths: list[int] = []
        for parent in parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return cls(list(tokens), list(parents), depths, [0.0] * len(tokens))

    @classmethod
    def chain(cls, tokens: Sequence[int], log_probs: Sequence[float]) -> Tree:
        """Builds a chain from tokens and path log-probabilities, both [n] including the root."""
        n = len(tokens)
        return cls(list(tokens), list(range(-1, n - 1)), list(range(n)), list(log_probs))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def n_drafted(self) -> int:
        """Number of nodes below the root of the tree."""
        return len(self.tokens) - 1

    @property
    def is_chain(self) -> bool:
        """True if the tree has no branches."""
        return self.depths[-1] == self.n_drafted

    def child(self, node: int, token: int) -> int | None:
        """Returns the number of a node's child with this token, or None if there is none."""
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
        """Returns the accepted path of nodes, root first, and the number of accepted candidates.

        choose: returns the target's token after a node. take: receives each of these tokens; if it
        returns True, the path ends before that token, which still counts as accepted if drafted.
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
        """Returns the accepted path, root first. chosen: target's tokens after the path's nodes."""
        tokens = iter(chosen)
        return self.follow(lambda _: next(tokens, -1), lambda _: False)[0]

    def first(self, n_drafted: int) -> Tree:
        """Returns the tree of the root and the first n_drafted nodes below the root."""
        n = n_drafted + 1
        if n >= len(self):
            return self
        return Tree(self.tokens[:n], self.parents[:n], self.depths[:n], self.log_probs[:n])

    def only(self, nodes: Sequence[int]) -> Tree:
        """Returns the tree of some of the nodes, in ascending order and with their parents."""
        if len(nodes) == len(self):
            return self
        number = {node: i for i, node in enumerate(nodes)}
        number[-1] = -1
        return Tree(
            [self.tokens[x] for x in nodes],
            [number[self.parents[x]] for x in nodes],
            [self.depths[x] for x in nodes],
            [self.log_probs[x] for x in nodes],
        )

    def main_chain(self) -> Tree:
        """Returns the main chain: from the root on always the first, most probable child."""
        if self.is_chain:
            return self
        path = [0]
        for node, parent in enumerate(self.parents):
            if parent == path[-1]:
                path.append(node)
        return Tree.chain([self.tokens[i] for i in path], [self.log_probs[i] for i in path])


def merged(trees: Sequence[Tree]) -> Tree:
    """Merges trees with equal roots into one, most probable nodes first.

    A node of several trees gets its highest probability: proposers may agree for the same reason.
    """
    if len(trees) == 1:
        return trees[0]
    nodes: dict[tuple[int, int], int] = {}
    tokens, parents, depths, probs = [trees[0].tokens[0]], [-1], [0], [0.0]
    for tree in trees:
        place = [0]
        for node in range(1, len(tree)):
            parent, token, prob = (
                place[tree.parents[node]],
                tree.tokens[node],
                tree.log_probs[node],
            )
            at = nodes.setdefault((parent, token), len(tokens))
            place.append(at)
            if at == len(tokens):
                tokens.append(token)
                parents.append(parent)
                depths.append(depths[parent] + 1)
                probs.append(prob)
            elif prob > probs[at]:
                probs[at] = prob
    # Nodes were added after their parents, and a stable sort keeps that order on ties.
    order = sorted(range(len(tokens)), key=lambda node: -probs[node])
    number = {node: i for i, node in enumerate(order)}
    number[-1] = -1
    return Tree(
        [tokens[node] for node in order],
        [number[parents[node]] for node in order],
        [depths[node] for node in order],
        [probs[node] for node in order],
    )
