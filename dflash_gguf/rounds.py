"""One round of speculative decoding, and what it asks of a model.

    propose   a proposer gives candidates for the coming positions, a rule picks those to verify
    verify    the target runs once over their tree (a chain is a tree of width 1)
    follow    from the root down, while the target's own token is a child of the node
    commit    the path stays in every cache; the rest leaves no trace

The decode loop, measurements and simulations run rounds by these two: `Speculation` and `verify`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .draft.proposer import Proposer
from .draft.tree import Tree
from .policy.costs import Round
from .policy.rules import Rule
from .sampling import Sampler

Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all) between micro-batches. It may raise, to cancel."""

Clock = Callable[[str], AbstractContextManager[object]]
"""Gives what times a with block, by the name of a phase."""


class Rows(Protocol):
    """The target's scores of one pass, one row per token asked for; valid until the next pass."""

    def argmax(self, index: int = -1) -> int:
        """Token with the largest logit of a row, lowest id on ties; no row is copied."""

    def top(self, index: int = -1) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The best tokens of a row and their logits, best first, where `keep_top` said so."""

    def logits(self, index: int = -1) -> NDArray[np.float32]:
        """One row, float32 [n_vocab], fetched when asked for."""


class Engine(Protocol):
    """What a timeline is computed by."""

    @property
    def max_verify(self) -> int:
        """Rows of one verify at most."""

    @property
    def n_most_top(self) -> int:
        """Best tokens of a row that `keep_top` may be asked for."""

    def keep_top(self, k: int) -> bool:
        """Has the k best of every row picked in the passes to come; False if they are not."""


class Timeline(Protocol):
    """A `core.Sequence`: `position` tokens are in the caches, at most `n_ctx`.

    A call that raises leaves `position` where the last finished micro-batch put it, and the
    timeline usable from there.
    """

    @property
    def engine(self) -> Engine:
        """Its engine."""

    @property
    def n_ctx(self) -> int:
        """Tokens it may hold."""

    @property
    def position(self) -> int:
        """Tokens the caches hold."""

    def sync(self, tokens: Sequence[int]) -> int:
        """Goes back to where the timeline agrees with `tokens`; how many of them are there.

        At least the last is left to prefill. A verify that waits for its commit is closed.
        """

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> Rows:
        """Appends tokens, in micro-batches, and returns the row of the last one.

        What `progress` raises is passed on.
        """

    def decode(self, token: int) -> Rows:
        """Appends one token and returns its row."""

    def verify(self, tokens: Sequence[int]) -> Rows:
        """Runs tokens after the timeline and returns a row for each; appends nothing."""

    def verify_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Rows:
        """The same for nodes that see only their ancestors; the root comes first, parent -1."""

    def commit(self, n: int) -> None:
        """Appends the first n tokens of the verify that waits for it; 0 is always allowed."""

    def commit_path(self, nodes: Sequence[int]) -> None:
        """Appends a path of the tree that waits for it, from the root down."""


def untimed(_phase: str) -> AbstractContextManager[object]:
    """A clock that stands still."""
    return nullcontext()


class Speculation:
    """What an answer's rounds verify: a proposer's candidates, those that a rule picks."""

    def __init__(
        self, proposer: Proposer, rule: Rule, sampler: Sampler, clock: Clock = untimed
    ) -> None:
        """sampler: what the target's rows are given to. clock: of "draft" and "tree"."""
        self._proposer, self._rule, self._sampler, self._clock = proposer, rule, sampler, clock
        self._has_failed = False

    def propose(self, done: Round, seen: Sequence[int], n_left: int, n_room: int) -> Tree | None:
        """The tree to verify; None for a plain round. Fills in what was drafted.

        seen: prompt and answer; the last token is the root, which is not in the caches yet.
        n_left: tokens the answer may still take. n_room: rows of the pass at most.
        """
        if self._has_failed:
            return None
        rule = self._rule
        limit = min(self._proposer.max_draft, n_left - 1)
        n = rule.choose(done.position, limit) if limit > 0 else 0
        if n == 0:
            return None
        is_narrow = rule.is_narrow
        done.n_positions, done.is_narrow = n, is_narrow
        with self._clock("draft"):
            candidates = self._proposer.propose(seen, n, self._sampler, is_narrow=is_narrow)
        if candidates is None:
            self._has_failed = True
            return None
        with self._clock("tree"):
            tree = rule.pick(seen[-1], candidates, n_room - 1)
        if not tree.n_drafted:
            return None
        done.verifies(tree)
        return tree

    def observe(self, done: Round, tokens: Sequence[int]) -> None:
        """Learns from a round and the tokens that the target chose in it, whatever its kind."""
        if not self._has_failed:
            self._proposer.observe(tokens)
            self._rule.observe(done)


def verify(
    timeline: Timeline,
    tree: Tree,
    choose: Callable[[Rows, int], int],
    take: Callable[[int], bool],
    clock: Clock = untimed,
) -> int:
    """Verifies a tree and commits the path that the target takes; returns the candidates it took.

    choose: the target's token after a node, given the rows. take: is given each of these tokens;
    True ends the path before the token, so that nothing behind it is committed. clock: of "verify"
    and "commit". After an exception the timeline is as before the round.
    """
    try:
        with clock("verify"):
            if tree.is_chain:
                rows = timeline.verify(tree.tokens)
            else:
                rows = timeline.verify_tree(tree.tokens, tree.parents)
        path, n_taken = tree.follow(partial(choose, rows), take)
        with clock("commit"):
            if tree.is_chain:
                timeline.commit(len(path))
            else:
                timeline.commit_path(path)
    except BaseException:
        timeline.commit(0)
        raise
    return n_taken
