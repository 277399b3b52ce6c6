"""How many positions a round drafts, and which of the candidates it verifies."""

from __future__ import annotations

from typing import Protocol

from ..draft.tree import Candidates, Tree, chain, grow
from .costs import Round


class Rule(Protocol):
    """Chooses twice a round: before the draft how long it is, after it what is verified."""

    @property
    def is_narrow(self) -> bool:
        """Whether the best candidate of a position is all it asks for."""

    @property
    def n_rows(self) -> int:
        """Rows of the largest pass that it would run now."""

    def choose(self, position: int, limit: int) -> int:
        """Positions to draft after `position` tokens, 0 to `limit`; 0 is a plain round."""

    def pick(self, root: int, candidates: Candidates, limit: int) -> Tree:
        """The tree to verify, of at most `limit` nodes below the root; none: a plain pass."""

    def observe(self, done: Round) -> None:
        """Learns from a round."""


class FixedChain:
    """The same length every round, shorter only where the answer or the context ends."""

    is_narrow = True

    def __init__(self, length: int, least: int = 0) -> None:
        self._length, self._least = length, least

    @property
    def n_rows(self) -> int:
        """Those of its chain and the last token."""
        return self._length + 1

    def choose(self, position: int, limit: int) -> int:  # noqa: ARG002
        """`length`, or what is left, if that is at least `least`."""
        length = min(self._length, limit)
        return length if length >= self._least else 0

    def pick(self, root: int, candidates: Candidates, limit: int) -> Tree:
        """The best candidate of every position."""
        return chain(root, candidates, limit)

    def observe(self, done: Round) -> None:
        """Learns nothing."""


class FixedTree:
    """The same number of nodes every round, of drafts of one length."""

    is_narrow = False

    def __init__(self, budget: int, length: int, least: int = 0, *, spine: bool = False) -> None:
        """spine: see `grow`."""
        self._budget, self._spine = budget, spine
        self._lengths = FixedChain(min(length, budget), least)

    @property
    def n_rows(self) -> int:
        """Those of its nodes and the last token."""
        return self._budget + 1

    def choose(self, position: int, limit: int) -> int:
        """As a chain: a tree is no deeper than its budget."""
        return self._lengths.choose(position, limit)

    def pick(self, root: int, candidates: Candidates, limit: int) -> Tree:
        """The likeliest nodes."""
        return grow(root, candidates, min(self._budget, limit), spine=self._spine)

    def observe(self, done: Round) -> None:
        """Learns nothing."""
