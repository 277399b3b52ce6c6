"""Answers that were asked for, as those who run their rounds see them."""

from __future__ import annotations

import time
from collections import deque

from ..kv_cache.prefix_cache import PrefixHit
from ..native import Sequence as KvSequence
from ..outputs import Step
from ..speculative.proposers.proposer import Request
from ..speculative.speculator import Progress, Speculator
from .writing import Writing

MAX_UNREAD_TOKENS = 256
"""Tokens of an answer that nobody has read yet, after which it pauses."""


class Group:
    """Answers that are drafted alike, in one pass of the drafter."""

    def __init__(self, speculator: Speculator) -> None:
        self.speculator = speculator
        self.jobs: set[Job] = set()


class Job:
    """An answer that was asked for. It waits, holds a sequence, or is over."""

    def __init__(
        self,
        number: int,
        writing: Writing,
        group: Group | None,
        n_top: int,
        on_prefill: Progress | None,
    ) -> None:
        """number: in the order in which they came.

        n_top: best tokens of a row that are all it looks at.
        """
        self.number = number
        self.writing = writing
        self.answer = writing.answer
        self.history = writing.history
        self.group = group
        self.n_top = n_top
        self.on_prefill = on_prefill
        self.request = Request(None, writing.history, writing.sampler.scorer)
        self.assigned_sequence: KvSequence | None = None
        self.steps: deque[Step] = deque()
        self.n_unread = 0
        self.is_over = False
        self.error: BaseException | None = None
        self.prefill_started: float | None = None
        self.n_to_fill = 0
        self.prefix_hit = PrefixHit()

    @property
    def sequence(self) -> KvSequence:
        """Its sequence, which it has."""
        assert self.assigned_sequence is not None
        return self.assigned_sequence

    @property
    def is_decoding(self) -> bool:
        """Whether only the last token is not in the caches yet; else some are to be filled in."""
        return bool(self.answer.tokens) and self.sequence.position == len(self.history) - 1

    @property
    def ignore_prefix_cache(self) -> bool:
        """Whether it is to begin with nothing of what earlier answers left behind."""
        return not self.writing.config.cache_prompt and not self.n_to_fill

    @property
    def is_throttled(self) -> bool:
        """Whether its reader is too far behind."""
        return self.n_unread >= MAX_UNREAD_TOKENS

    @property
    def n_rows(self) -> int:
        """Rows that its next round takes."""
        tree = self.request.tree
        return 1 if tree is None else len(tree.tokens)

    def add(self, step: Step) -> None:
        """A step for its reader."""
        self.steps.append(step)
        self.n_unread += len(step.tokens)

    def next_step(self) -> Step | None:
        """What its reader gets next, if there is something.

        Errors: StopIteration where it is over; what went wrong for it.
        """
        if self.steps:
            step = self.steps.popleft()
            self.n_unread -= len(step.tokens)
            return step
        if self.error is not None:
            raise self.error
        if self.is_over:
            raise StopIteration
        return None

    def skip_steps(self) -> bool:
        """Takes all that are there for a reader who wants none; whether it is over.

        Errors: what went wrong for it.
        """
        self.steps.clear()
        self.n_unread = 0
        if self.error is not None:
            raise self.error
        return self.is_over

    def filled(self, sample_s: float, *, is_first: bool) -> None:
        """A piece of what is before the last token has come in.

        sample_s: that were counted then. is_first: whether it is of the prompt; else it is computed
        anew, which counts in no phase.
        """
        if not is_first or self.prefill_started is None:
            self.writing.account.sampled(-sample_s)
            return
        self.writing.account.set_prefill(time.perf_counter() - self.prefill_started)
        if self.on_prefill is not None and self.assigned_sequence is not None:
            n_there = self.assigned_sequence.position - self.writing.n_cached
            self.on_prefill(min(max(n_there, 0), self.n_to_fill), self.n_to_fill)
