"""Draft trees: what a round verifies, with the chance of every node.

A node's path is no likelier than its parent's, so in the order of chances parents come first, and
the first nodes of a tree are themselves the best tree of their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tree:
    """Nodes to verify, parents before children. Node 0 is the root: the token chosen last.

    Nobody changes one that is made; it is not frozen, as that takes several times as long to make.

    tokens, parents, depths, log_probs: [n]; the root has parent -1, depth 0 and chance 1.
    log_probs: of the whole path from the root to the node.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    log_probs: list[float]
    _children: dict[tuple[int, int], int] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, tokens: Sequence[int], parents: Sequence[int] | None = None) -> Tree:
        """A tree of these nodes, a chain without parents; all chances are 1."""
        parents = range(-1, len(tokens) - 1) if parents is None else parents
        depths: list[int] = []
        for parent in parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return cls(list(tokens), list(parents), depths, [0.0] * len(tokens))

    @classmethod
    def chain(cls, tokens: Sequence[int], log_probs: Sequence[float]) -> Tree:
        """A chain with the log-chances of its paths; both [n], with the root."""
        n = len(tokens)
        return cls(list(tokens), list(range(-1, n - 1)), list(range(n)), list(log_probs))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def n_drafted(self) -> int:
        """Nodes below the root."""
        return len(self.tokens) - 1

    @property
    def is_chain(self) -> bool:
        """True if every node follows the one before it."""
        return self.depths[-1] == self.n_drafted

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
        return Tree(self.tokens[:n], self.parents[:n], self.depths[:n], self.log_probs[:n])

    def main_chain(self) -> Tree:
        """The chain that follows the first child of every node: the likeliest one."""
        if self.is_chain:
            return self
        path = [0]
        for node, parent in enumerate(self.parents):
            if parent == path[-1]:
                path.append(node)
        return Tree.chain([self.tokens[i] for i in path], [self.log_probs[i] for i in path])


def merged(trees: Sequence[Tree]) -> Tree:
    """All paths of some trees with one root, the likeliest first.

    What several propose has the best chance that one of them gives: they may agree for the same
    reason.
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
    # Nodes are made after their parents, so a stable sort keeps that order on ties.
    order = sorted(range(len(tokens)), key=lambda node: -probs[node])
    number = {node: i for i, node in enumerate(order)}
    number[-1] = -1
    return Tree(
        [tokens[node] for node in order],
        [number[parents[node]] for node in order],
        [depths[node] for node in order],
        [probs[node] for node in order],
    )
