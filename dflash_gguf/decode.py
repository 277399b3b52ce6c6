"""The decode loop: prefill, then rounds until something ends the answer.

The loop knows the model only through `Session` and the vocabulary only through `Vocabulary`, so
that a scripted session tests every way an answer can end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .config import DecodeConfig
from .results import Result, Step
from .sampling import Sampler
from .text_stream import StopMatcher, Utf8Stream

Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all) between micro-batches. It may raise, to cancel."""


class Rows(Protocol):
    """The target's scores of one pass, one row per token asked for; valid until the next pass."""

    def argmax(self, index: int = -1) -> int:
        """Token with the largest logit of a row, lowest id on ties; no row is copied."""

    def logits(self, index: int = -1) -> NDArray[np.float32]:
        """One row, float32 [n_vocab], fetched when asked for."""


class Session(Protocol):
    """One timeline of a model: `position` tokens are in its caches, at most `n_ctx`.

    A call that raises leaves `position` where the last finished micro-batch put it, and the
    session usable from there.
    """

    @property
    def n_ctx(self) -> int:
        """Tokens the caches can hold."""

    @property
    def position(self) -> int:
        """Tokens the caches hold."""

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> Rows:
        """Appends tokens, in micro-batches, and returns the row of the last one.

        What `progress` raises is passed on.
        """

    def decode(self, token: int) -> Rows:
        """Appends one token and returns its row."""


class Vocabulary(Protocol):
    """What the loop asks of a tokenizer."""

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Ids that end an answer."""

    @property
    def suppressed_tokens(self) -> frozenset[int]:
        """Ids that are never drawn."""

    def piece(self, token: int) -> bytes:
        """The bytes a token adds to the text; none for a control token."""


class _Cancelled(Exception):
    """Leaves a prefill from within its progress callback."""


class Generation:
    """One answer in the making: iterate for its steps, `result()` at any time for its account.

    `history` holds the tokens that are in the session's caches, followed by those that the
    running call is about to add: after an interruption its first `session.position` are true.
    """

    def __init__(
        self,
        session: Session,
        vocabulary: Vocabulary,
        prompt: Sequence[int],
        config: DecodeConfig,
        *,
        n_cached: int = 0,
        on_prefill: Progress | None = None,
        on_prefilled: Callable[[], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        """Computes nothing yet.

        n_cached: the first so many prompt tokens are in the session already.
        on_prefill: progress of the prefill. on_prefilled: called once when it is done.
        cancelled: asked between micro-batches and rounds; True ends the answer.
        Errors: ValueError for an empty prompt or one that does not fit into the context.
        """
        check_prompt(prompt, session.n_ctx)
        self.config = config
        self.history = list(prompt)
        self._session = session
        self._vocabulary = vocabulary
        self._prompt = tuple(prompt)
        self._n_cached = n_cached
        self._on_prefill = on_prefill
        self._on_prefilled = on_prefilled
        self._cancelled = cancelled or (lambda: False)
        banned = vocabulary.stop_tokens if config.ignore_eos else frozenset()
        self._sampler = Sampler(config, banned=banned | vocabulary.suppressed_tokens)
        self._utf8 = Utf8Stream()
        self._stop = StopMatcher(config.stop_texts)
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._rounds = 0
        self._n_decoded = 0
        self._phase_s = {"prefill": 0.0, "decode": 0.0, "sample": 0.0}
        self._wall_s = {"prefill": 0.0, "decode": 0.0}
        self._stop_reason = "cancelled"
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
        return Result(
            tokens=tuple(self._tokens),
            text="".join(self._texts),
            n_prompt=len(self._prompt),
            n_prefilled=len(self._prompt) - self._n_cached,
            n_decoded=self._n_decoded,
            rounds=self._rounds,
            prefill_s=self._wall_s["prefill"],
            decode_s=self._wall_s["decode"],
            stop_reason=self._stop_reason,
            draft=self.config.draft,
            seed=self._sampler.seed,
            phase_s=dict(self._phase_s),
        )

    def _run(self) -> Generator[Step, None, None]:
        started = time.perf_counter()
        try:
            rows = self._prefill()
        except _Cancelled:
            return
        finally:
            self._wall_s["prefill"] = time.perf_counter() - started
        if self.config.max_tokens == 0:
            self._stop_reason = "length"
            return
        started, new = time.perf_counter(), [self._choose(rows)]
        self._wall_s["prefill"] += time.perf_counter() - started
        while True:
            step, ended = self._accept(new)
            yield step
            if ended:
                return
            started = time.perf_counter()
            new = self._round(new[-1])
            self._wall_s["decode"] += time.perf_counter() - started
            self._rounds += 1
            self._n_decoded += len(new)

    def _round(self, root: int) -> list[int]:
        """One round of plain decoding: puts `root` into the caches and draws its successor."""
        self.history.append(root)
        started = time.perf_counter()
        rows = self._session.decode(root)
        self._phase_s["decode"] += time.perf_counter() - started
        return [self._choose(rows)]

    def _prefill(self) -> Rows:
        def progress(done: int, total: int) -> None:
            if self._cancelled():
                raise _Cancelled
            if self._on_prefill is not None:
                self._on_prefill(done, total)

        started = time.perf_counter()
        rows = self._session.prefill(self._prompt[self._n_cached :], progress)
        self._phase_s["prefill"] = time.perf_counter() - started
        if self._on_prefilled is not None:
            self._on_prefilled()
        return rows

    def _choose(self, rows: Rows) -> int:
        """Draws the token after `history`."""
        started = time.perf_counter()
        token = rows.argmax() if self._sampler.is_argmax else None
        if token is None or token in self._sampler.banned:
            token = self._sampler.choose(rows.logits(), self.history, len(self.history)).token
        self._phase_s["sample"] += time.perf_counter() - started
        return token

    def _accept(self, tokens: Sequence[int]) -> tuple[Step, bool]:
        """Takes new tokens up to the one that ends the answer, if one does."""
        taken: list[int] = []
        text = ""
        reason: str | None = None
        for token in tokens:
            taken.append(token)
            self._tokens.append(token)
            if token in self._vocabulary.stop_tokens and not self.config.ignore_eos:
                reason = "token"
            else:
                text += self._stop.push(self._utf8.push(self._vocabulary.piece(token)))
                reason = self._limit()
            if reason is not None:
                self._stop_reason = reason
                text += self._stop.push(self._utf8.finish()) + self._stop.finish()
                break
        self._texts.append(text)
        return Step(tuple(taken), text), reason is not None

    def _limit(self) -> str | None:
        """Why the answer ends after the token just taken, or None."""
        if self._stop.matched is not None:
            return "text"
        if self.config.max_tokens is not None and len(self._tokens) >= self.config.max_tokens:
            return "length"
        if len(self._prompt) + len(self._tokens) > self._session.n_ctx:
            return "context"
        return "cancelled" if self._cancelled() else None


def check_prompt(prompt: Sequence[int], n_ctx: int) -> None:
    """ValueError unless the prompt has a token and fits into the context."""
    if not prompt:
        raise ValueError("the prompt is empty, it must hold at least one token")
    if len(prompt) > n_ctx:
        raise ValueError(f"the prompt has {len(prompt)} tokens, the context holds {n_ctx}")
