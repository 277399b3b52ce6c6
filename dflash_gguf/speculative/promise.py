"""What drafts promise before they are made: tokens by how long they are and how much is verified.

A chain promises what its expected_path_probs says. A tree also promises what is beside that, which
is a mean over the trees drafted lately, as far as such promises were kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._validate import number
from .ddtree import PositionCandidates, best_first_tree
from .tree import Tree

Floats = NDArray[np.float64]
Sizes = tuple[int, ...]

MEMORY = 16
"""Drafts after which one weighs 1/e in what others promise."""


class Trust:
    """How far expectations of accepted candidates came true lately."""

    def __init__(self, weight: float, memory: int) -> None:
        """weight: accepted candidates that it begins with: so many missing ones halve it.

        memory: observations after which one weighs 1/e.
        """
        self._weight, self._keep = weight, 1.0 - 1.0 / memory
        self.expected = self.accepted = weight

    @property
    def value(self) -> float:
        """Accepted candidates for every one that was expected."""
        return self.accepted / self.expected

    def observe(self, n_expected: float, n_accepted: int) -> None:
        """Compares what was expected with what came."""
        keep, prior = self._keep, (1.0 - self._keep) * self._weight
        self.expected = keep * self.expected + prior + n_expected
        self.accepted = keep * self.accepted + prior + n_accepted


class Promise:
    """What drafts with ranked candidates promised lately, and how far such promises were kept.

    lengths, sizes: positions and nodes below the root that are tried, in rising order.
    """

    TRUST_MEMORY, TRUST_WEIGHT = 32, 2.0
    """Drafts after which an outcome weighs 1/e, and candidates that the trust begins with."""

    def __init__(self) -> None:
        self._tables: dict[tuple[Sizes, Sizes], tuple[Floats, int]] = {}
        self.trust = Trust(self.TRUST_WEIGHT, self.TRUST_MEMORY)

    @property
    def is_proven(self) -> bool:
        """Whether some candidates were accepted lately."""
        return self.trust.accepted >= 2.0 * self.TRUST_WEIGHT

    def table(self, expected_path_probs: Sequence[float], lengths: Sizes, sizes: Sizes) -> Floats:
        """Tokens beyond the first of chains, trees and brief chains, float64 [3, length, size].

        expected_path_probs: chances of the paths of brief chains, which are no better than ranked
        ones. Before a tree was drafted, what is beside its chain is taken to follow from how sure
        that is.
        """
        path = np.array(expected_path_probs[: lengths[-1]])
        chains, trees, brief = _gains(path, None, lengths, sizes)[[0, 1, 0]]
        found, _ = self._tables.get((lengths, sizes), (None, 0))
        if found is None:
            steps = np.sort(path / np.concatenate([[1.0], path[:-1]]))
            sureness = min(int(20.0 * float(steps[len(steps) // 2])), 19)
            trees = trees + _beside(sureness, lengths, sizes)
        else:
            chains, trees = np.maximum((chains, trees), self.trust.value * found)
        return np.stack([chains, trees, brief])

    def add(self, tree: Tree, n: int, lengths: Sizes, sizes: Sizes) -> None:
        """Takes up a draft of n positions. tree: its likeliest nodes."""
        key = lengths, sizes
        table, n_seen = self._tables.get(key, (np.zeros(()), 0))
        main_chain = list(map(math.exp, tree.main_chain().log_probs[1:])) or [0.0]
        last = main_chain[-1] / main_chain[-2] if len(main_chain) > 1 else main_chain[-1]
        # What was not drafted, or was too unlikely to be among the nodes, goes on in like manner.
        last = last if len(main_chain) >= n else 0.0
        while len(main_chain) < lengths[-1]:
            main_chain.append(main_chain[-1] * last)
        n_seen = min(n_seen + 1, MEMORY)
        gains = _gains(np.array(main_chain), tree, lengths, sizes)
        self._tables[key] = table + (gains - table) / n_seen, n_seen

    def to_dict(self) -> dict[str, float]:
        """How far promises were kept."""
        return {"expected": self.trust.expected, "accepted": self.trust.accepted}

    def learn(self, stored: Mapping[str, Any]) -> None:
        """Takes up what `to_dict` gave; KeyError, TypeError or ValueError for anything else."""
        expected = number("expected", stored["expected"], 1e-9, 1e6)
        accepted = number("accepted", stored["accepted"], 1e-9, 1e6)
        self.trust.expected, self.trust.accepted = expected, accepted


def _gains(main_chain: Floats, tree: Tree | None, lengths: Sizes, sizes: Sizes) -> Floats:
    """Tokens beyond the first that one draft promises, [2, length, size]."""
    chain = np.concatenate([[0.0], np.cumsum(main_chain)])
    nodes = np.minimum(np.array(lengths)[:, None], np.array(sizes)[None, :])
    table = np.stack([chain[nodes]] * 2)
    if tree is not None and tree.n_drafted:
        depths, probs = np.array(tree.depths[1:]), np.exp(tree.log_probs[1:])
        for row, length in enumerate(lengths):
            found = np.cumsum(probs[depths <= length])
            table[1, row] = np.maximum(
                table[1, row], found[np.minimum(sizes, len(found)) - 1] if len(found) else 0.0
            )
    return table


@cache
def _beside(sureness: int, lengths: Sizes, sizes: Sizes) -> Floats:
    """What a tree promises beyond its chain, [length, size], before one was drafted.

    sureness: of the best candidates, in twentieths. Others are taken to have half the chance of
    the one before each.
    """
    best = sureness / 20.0
    probs = np.array([best, *(1.0 - best) * 0.5 ** np.arange(1, 8)])
    steps = np.log(np.maximum(np.tile(probs, (lengths[-1], 1)), 1e-9))
    tokens = np.tile(np.arange(len(probs)), (lengths[-1], 1))
    tree = best_first_tree(0, PositionCandidates(tokens, steps), sizes[-1])
    chains, trees = _gains(np.exp(np.cumsum(steps[:, 0])), tree, lengths, sizes)
    found: Floats = trees - chains
    return found
