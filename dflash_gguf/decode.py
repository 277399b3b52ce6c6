"""The decode loop: prefill, then rounds until something ends the answer.

The loop knows the model only through `Timeline` and the vocabulary only through `Vocabulary`, so
that a scripted timeline tests every way an answer can end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .account import Account
from .answer import Answer, Vocabulary
from .config import DecodeConfig
from .draft.proposer import Proposer
from .draft.tree import Tree
from .policy.costs import Round
from .policy.rules import Rule
from .results import Result, Step
from .sampling import Sampler
from .text.reasoning import Splitter

Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all) between micro-batches. It may raise, to cancel."""


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


class _Cancelled(Exception):
    """Leaves a prefill from within its progress callback."""


class Generation:
    """One answer in the making: iterate for its steps, `result()` at any time for its account.

    `history` is the prompt and the answer so far: what penalties and the drafter's scores look at.
    What the caches hold is for the timeline to know.
    """

    def __init__(
        self,
        timeline: Timeline,
        vocabulary: Vocabulary,
        prompt: Sequence[int],
        config: DecodeConfig,
        *,
        proposer: Proposer | None = None,
        rule: Rule | None = None,
        on_prefill: Progress | None = None,
        cancelled: Callable[[], bool] | None = None,
        splitter: Splitter | None = None,
    ) -> None:
        """Computes nothing yet.

        proposer, rule: where candidates come from, and which of them are verified; without both,
            rounds are plain.
        on_prefill: progress of the prefill.
        cancelled: asked between micro-batches and tokens; True ends the answer.
        splitter: tells thoughts apart from the answer's text.
        Errors: ValueError for an empty prompt or one that does not fit into the context.
        """
        check_prompt(prompt, timeline.n_ctx)
        self.config = config
        self.history = list(prompt)
        self._timeline = timeline
        self._prompt = tuple(prompt)
        self._n_cached = 0
        self._has_top = False
        self._on_prefill = on_prefill
        self._cancelled = cancelled or (lambda: False)
        self._proposer = None if rule is None else proposer
        self._rule = rule
        banned = vocabulary.stop_tokens if config.ignore_eos else frozenset()
        self._sampler = Sampler(config, banned=banned | vocabulary.suppressed_tokens)
        n_room = timeline.n_ctx - len(prompt)
        self._answer = Answer(vocabulary, config, n_room, self._cancelled, splitter)
        self._account = Account(self._proposer is not None)
        self._steps = self._run()

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        return next(self._steps)

    def close(self) -> None:
        """Ends the answer where it is."""
        self._steps.close()

    def result(self) -> Result:
        """The account so far; final once the iteration has ended."""
        account = self._account
        return Result(
            tokens=tuple(self._answer.tokens),
            text=self._answer.text,
            reasoning=self._answer.reasoning,
            n_prompt=len(self._prompt),
            n_prefilled=len(self._prompt) - self._n_cached,
            n_decoded=account.n_decoded,
            rounds=account.rounds,
            prefill_s=account.prefill_s,
            decode_s=account.decode_s,
            stop_reason=self._answer.stop_reason or "cancelled",
            draft="none" if self._proposer is None else self.config.draft,
            seed=self._sampler.seed,
            n_drafted=account.n_drafted,
            accept_histogram=account.accept_histogram,
            rounds_by_draft=None if self._proposer is None else dict(account.rounds_by_draft),
            phase_s=account.phase_s,
        )

    def _run(self) -> Generator[Step, None, None]:
        started = time.perf_counter()
        self._has_top = self._keep_top()
        try:
            rows = self._prefill()
        except _Cancelled:
            return
        finally:
            self._account.prefill_s = time.perf_counter() - started
        if self.config.max_tokens == 0:
            self._answer.stop_reason = "length"
            return
        started = time.perf_counter()
        ended = self._take(self._choose(rows, -1))
        self._account.prefill_s += time.perf_counter() - started
        text, reasoning = self._answer.new_text()
        yield Step(tuple(self._answer.tokens), text, reasoning=reasoning)
        while not ended:
            yield self._step()
            ended = self._answer.stop_reason is not None

    def _prefill(self) -> Rows:
        def progress(done: int, total: int) -> None:
            if self._cancelled():
                raise _Cancelled
            if self._on_prefill is not None:
                self._on_prefill(done, total)

        with self._account.phase("prefill"):
            self._n_cached = self._timeline.sync(self._prompt)
            return self._timeline.prefill(self._prompt[self._n_cached :], progress)

    def _step(self) -> Step:
        """One round: puts the last token, and what follows it, into the caches."""
        n_before = len(self._answer.tokens)
        with self._account.round(len(self.history) - 1) as done:
            tree = self._propose(done)
            if tree is not None and tree.n_drafted:
                done.verifies(tree)
                done.n_accepted = self._verify(tree)
            else:
                with self._account.phase("decode"):
                    rows = self._timeline.decode(self.history[-1])
                self._take(self._choose(rows, -1))
            done.n_tokens = len(self._answer.tokens) - n_before
        tokens = tuple(self._answer.tokens[n_before:])
        if self._proposer is not None and self._rule is not None:
            self._proposer.observe(tokens)
            self._rule.observe(done)
        text, reasoning = self._answer.new_text()
        return Step(tokens, text, done.n_drafted, done.n_accepted, reasoning)

    def _propose(self, done: Round) -> Tree | None:
        """What may follow the last token: nothing in a plain round."""
        if self._proposer is None or self._rule is None:
            return None
        limit = min(self._proposer.max_draft, self._answer.n_left - 1)
        n = self._rule.choose(done.position, limit) if limit > 0 else 0
        if n == 0:
            return None
        done.n_positions, done.is_narrow = n, self._rule.is_narrow
        with self._account.phase("draft"):
            candidates = self._proposer.propose(
                self.history, n, self._sampler, is_narrow=self._rule.is_narrow
            )
        if candidates is None:
            self._rule = None
            return None
        n_room = min(self._timeline.engine.max_verify, self._timeline.n_ctx - done.position)
        with self._account.phase("tree"):
            return self._rule.pick(self.history[-1], candidates, n_room - 1)

    def _verify(self, tree: Tree) -> int:
        """Verifies a tree and commits what the answer keeps; returns how many nodes are in it.

        The walk ends at the token that ends the answer, so that nothing behind it is committed.
        """
        path: list[int] = []
        node: int | None = 0
        n_accepted = 0
        try:
            with self._account.phase("verify"):
                rows = self._rows_of(tree)
            while node is not None:
                path.append(node)
                token = self._choose(rows, node)
                node = tree.child(node, token)
                n_accepted += node is not None
                if self._take(token):
                    break
            with self._account.phase("commit"):
                if tree.is_chain:
                    self._timeline.commit(len(path))
                else:
                    self._timeline.commit_path(path)
        except BaseException:
            self._timeline.commit(0)
            raise
        return n_accepted

    def _rows_of(self, tree: Tree) -> Rows:
        if tree.is_chain:
            return self._timeline.verify(tree.tokens)
        return self._timeline.verify_tree(tree.tokens, tree.parents)

    def _take(self, token: int) -> bool:
        """Adds a token to the answer; whether it ends it."""
        self.history.append(token)
        return self._answer.take(token)

    def _keep_top(self) -> bool:
        """Whether rows come as their best tokens, since these are all that a draw looks at."""
        engine = self._timeline.engine
        n_most = engine.n_most_top
        return engine.keep_top(n_most if 0 < self._sampler.n_best <= n_most else 0)

    def _choose(self, rows: Rows, index: int) -> int:
        """Draws the token after `history` from a row."""
        with self._account.phase("sample"):
            if self._has_top:
                ids, logits = rows.top(index)
                place = len(self.history)
                return self._sampler.choose_among(ids.astype(np.int64), logits, place).token
            token = rows.argmax(index) if self._sampler.is_argmax else None
            if token is None or token in self._sampler.banned:
                row = rows.logits(index)
                token = self._sampler.choose(row, self.history, len(self.history)).token
        return token


def check_prompt(prompt: Sequence[int], n_ctx: int) -> None:
    """ValueError unless the prompt has a token and fits into the context."""
    if not prompt:
        raise ValueError("the prompt is empty, it must hold at least one token")
    if len(prompt) > n_ctx:
        raise ValueError(f"the prompt has {len(prompt)} tokens, the context holds {n_ctx}")
