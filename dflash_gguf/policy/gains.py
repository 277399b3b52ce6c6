"""What drafts give: tokens expected of every length and size, from the drafts made lately."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..draft.tree import Candidates, Tree

Floats = NDArray[np.float64]

WINDOW = 16
"""Drafts that means are taken over."""
PRIOR_CHANCE = 0.5
"""Of every candidate before anything was drafted."""
TRUST_MEMORY, TRUST_WEIGHT = 32, 2.0
"""Rounds after which an outcome weighs 1/e in the trust in expectations; and the accepted
candidates that the trust begins with: so many missing ones halve it."""


class Gains:
    """Expected tokens by what is verified, over the last drafts."""

    def __init__(self, lengths: Sequence[int], sizes: Sequence[int]) -> None:
        """lengths: positions a draft may have. sizes: nodes a pass may have. Both ascending."""
        self._lengths, self._sizes = np.array(lengths), np.array(sizes)
        steps = np.full(lengths[-1], math.log(PRIOR_CHANCE))
        self._drafts = deque([self._table(np.cumsum(steps), None)], maxlen=WINDOW)
        self._is_prior = True
        self._expected = self._accepted = TRUST_WEIGHT

    @property
    def trust(self) -> float:
        """Accepted candidates for every one that was expected."""
        return self._accepted / self._expected

    @property
    def is_proven(self) -> bool:
        """Whether some candidates were accepted lately."""
        return self._accepted >= 2.0 * TRUST_WEIGHT

    @property
    def first(self) -> float:
        """Chance of a draft's best first candidate."""
        return float(self.trust * np.mean([table[0, 0, 0] for table in self._drafts]))

    def tables(self) -> Floats:
        """Tokens beyond the first, float64 [draft, kind, length, size]; kinds: chain, tree."""
        return self.trust * np.stack(self._drafts)

    def of(self, candidates: Candidates, tree: Tree) -> Floats:
        """Tokens beyond the first that this draft promises, float64 [kind, size]; remembers it.

        tree: the likeliest nodes, as many as may be verified.
        """
        steps = candidates.log_chances[:, 0]
        n_more = int(self._lengths[-1]) - len(steps)
        if n_more > 0:  # what was not drafted is taken to be like the last position that was
            steps = np.concatenate([steps, np.full(n_more, steps[-1])])
        if self._is_prior:
            self._is_prior = False
            self._drafts.clear()
        self._drafts.append(self._table(np.cumsum(steps), tree))
        at = int(np.searchsorted(self._lengths, len(candidates)))
        found: Floats = self.trust * self._drafts[-1][:, min(at, len(self._lengths) - 1)]
        return found

    def of_chain(self, candidates: Candidates) -> Floats:
        """The same of its chains alone, float64 [size]; does not remember it."""
        chances = np.exp(np.cumsum(candidates.log_chances[:, 0]))
        chain = np.concatenate([[0.0], np.cumsum(chances)])
        found: Floats = self.trust * chain[np.minimum(self._sizes, len(chances))]
        return found

    def observe(self, n_expected: float, n_accepted: int) -> None:
        """Compares what was expected of a round with what came."""
        keep = 1.0 - 1.0 / TRUST_MEMORY
        prior = (1.0 - keep) * TRUST_WEIGHT
        self._expected = keep * self._expected + prior + n_expected
        self._accepted = keep * self._accepted + prior + n_accepted

    def _table(self, spine: Floats, tree: Tree | None) -> Floats:
        """Tokens beyond the first, [kind, length, size], of one draft.

        spine: log-chances of the chain's paths, for the longest length.
        """
        chances = np.exp(spine)
        chain = np.concatenate([[0.0], np.cumsum(chances)])
        nodes = np.minimum(self._lengths[:, None], self._sizes[None, :])
        table = np.stack([chain[nodes]] * 2)
        if tree is None:
            return table
        drafted = max(tree.depths)
        depths = np.array([*tree.depths[1:], *range(drafted + 1, len(spine) + 1)])
        paths = np.array([*np.exp(tree.log_chances[1:]), *chances[drafted:]])
        order = np.argsort(-paths, kind="stable")
        depths, paths = depths[order], paths[order]
        for row, length in enumerate(self._lengths):
            found = np.cumsum(paths[depths <= length])
            if len(found):
                table[1, row] = found[np.minimum(self._sizes, len(found)) - 1]
        return table


def ladder(steps: Sequence[int], *ends: int) -> list[int]:
    """The steps up to the last end, and the ends."""
    return sorted({n for n in itertools.chain(steps, ends) if 0 < n <= max(ends)})
