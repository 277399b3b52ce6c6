"""The decode loop: prefill, then rounds until something ends the answer.

The loop knows the model only through `Timeline` and the vocabulary only through `Vocabulary`, so
that a scripted timeline tests every way an answer can end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence

import numpy as np

from .account import Account
from .answer import Answer, Vocabulary
from .config import DecodeConfig
from .draft.proposer import Proposer, Request
from .policy.rule import Rule
from .results import Result, Step
from .rounds import Progress, Rows, Speculation, Timeline, verify
from .sampling import Sampler
from .text.reasoning import Splitter


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
        proposers: Sequence[Proposer] = (),
        rule: Rule | None = None,
        on_prefill: Progress | None = None,
        cancelled: Callable[[], bool] | None = None,
        splitter: Splitter | None = None,
    ) -> None:
        """Computes nothing yet.

        proposers, rule: where candidates come from, and which of them are verified; without both,
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
        banned = vocabulary.stop_tokens if config.ignore_eos else frozenset()
        self._sampler = Sampler(config, banned=banned | vocabulary.suppressed_tokens)
        n_room = timeline.n_ctx - len(prompt)
        self._answer = Answer(vocabulary, config, n_room, self._cancelled, splitter)
        self._request = Request(timeline, self.history, self._sampler)
        self._speculation: Speculation | None = None
        self._account = Account(bool(proposers) and rule is not None)
        if proposers and rule is not None:
            self._speculation = Speculation(proposers, rule, self._account.phase)
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
            draft="none" if self._speculation is None else self.config.draft,
            seed=self._sampler.seed,
            n_drafted=account.n_drafted,
            accept_histogram=account.accept_histogram,
            rounds_by_draft=None if self._speculation is None else dict(account.rounds_by_draft),
            by_proposer=dict(account.by_proposer),
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
            if self._speculation is not None:
                self._speculation.begin(self._request)
            return self._timeline.prefill(self._prompt[self._n_cached :], progress)

    def _step(self) -> Step:
        """One round: puts the last token, and what follows it, into the caches."""
        n_before, timeline = len(self._answer.tokens), self._timeline
        speculation, request = self._speculation, self._request
        is_asked = speculation is not None and not speculation.n_rest
        with self._account.round(len(self.history) - 1) as done:
            if speculation is not None and is_asked:
                request.n_room = min(timeline.engine.max_verify, timeline.n_ctx - done.position)
                request.n_left = self._answer.n_left
                speculation.propose(done, (request,))
            if request.tree is not None:
                phase = self._account.phase
                done.n_accepted = verify(timeline, request.tree, self._choose, self._take, phase)
            else:
                with self._account.phase("decode"):
                    rows = timeline.decode(self.history[-1])
                self._take(self._choose(rows, -1))
            done.n_tokens = len(self._answer.tokens) - n_before
        tokens = tuple(self._answer.tokens[n_before:])
        if speculation is not None and is_asked:
            if request.tree is not None:
                for credit in request.credits(tokens):
                    self._account.credit(*credit)
            speculation.observe(done, (request,), (tokens,))
        elif speculation is not None:
            speculation.pass_over(done)
        text, reasoning = self._answer.new_text()
        return Step(tokens, text, done.n_drafted, done.n_accepted, reasoning)

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
