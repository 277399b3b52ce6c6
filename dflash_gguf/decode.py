"""The decode loop: prefill, then rounds until something ends the answer.

The loop knows the model only through `Timeline` and the vocabulary only through `Vocabulary`, so
that a scripted timeline tests every way an answer can end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import cast

import numpy as np

from .account import Account
from .answer import Answer, Vocabulary
from .config import DecodeConfig
from .core import Error
from .draft.proposer import Proposer, Request
from .policy.rule import Rule
from .prefixes import Found, Prefixes
from .prefixes import Timeline as Held
from .results import Result, Step
from .rounds import Progress, Rows, Speculation, Timeline, verify
from .sampling import Chances, Sampler
from .text.chat import ChatPrompt
from .text.reasoning import Splitter


class _Cancelled(Exception):
    """Leaves a prefill from within its progress callback."""


class Writing:
    """One answer in the making: what was drawn, how it is drawn, and its account.

    `history` is the prompt and the answer so far: what penalties and the drafter's scores look at.
    What the caches hold is for the timeline to know. Whoever runs its rounds gives it rows.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt: Sequence[int],
        n_ctx: int,
        config: DecodeConfig,
        *,
        is_drafted: bool = False,
        cancelled: Callable[[], bool] | None = None,
        splitter: Splitter | None = None,
    ) -> None:
        """n_ctx: tokens that prompt and answer may have together.

        is_drafted: whether rounds may have candidates. cancelled: True ends the answer.
        splitter: tells thoughts apart from the answer's text.
        Errors: ValueError for an empty prompt or one that does not fit into the context.
        """
        check_prompt(prompt, n_ctx)
        self.config = config
        self.history = list(prompt)
        self.prompt = tuple(prompt)
        self.turns = tuple(prompt.turns) if isinstance(prompt, ChatPrompt) else ()
        self.n_ctx = n_ctx
        self.n_cached = self.n_draft_context = 0
        self.has_top = False
        self.cancelled = cancelled or (lambda: False)
        banned = vocabulary.stop_tokens if config.ignore_eos else frozenset()
        self.sampler = Sampler(config, banned=banned | vocabulary.suppressed_tokens)
        self.answer = Answer(vocabulary, config, n_ctx - len(prompt), self.cancelled, splitter)
        self.account = Account(is_drafted)
        self._is_drafted = is_drafted
        self._chances: list[Chances] = []
        self._n_given = 0

    def result(self) -> Result:
        """The account so far; final once the answer is over."""
        account = self.account
        return Result(
            tokens=tuple(self.answer.tokens),
            text=self.answer.text,
            reasoning=self.answer.reasoning,
            n_prompt=len(self.prompt),
            n_prefilled=len(self.prompt) - self.n_cached,
            n_draft_context=self.n_draft_context,
            n_decoded=account.n_decoded,
            rounds=account.rounds,
            prefill_s=account.prefill_s,
            decode_s=account.decode_s,
            stop_reason=self.answer.stop_reason or "cancelled",
            stop_text=self.answer.stop_text,
            draft=self.config.draft if self._is_drafted else "none",
            seed=self.sampler.seed,
            n_drafted=account.n_drafted,
            accept_histogram=account.accept_histogram,
            rounds_by_draft=dict(account.rounds_by_draft) if self._is_drafted else None,
            by_proposer=dict(account.by_proposer),
            phase_s=account.phase_s,
        )

    def take(self, token: int) -> bool:
        """Adds a token to the answer; whether it ends it."""
        self.history.append(token)
        return self.answer.take(token)

    def choose(self, rows: Rows, index: int) -> int:
        """Draws the token after `history` from a row."""
        with self.account.phase("sample"):
            if self.has_top:
                ids, logits = rows.top(index)
                place = len(self.history)
                return self.sampler.choose_among(ids.astype(np.int64), logits, place).token
            token = rows.argmax(index) if self.sampler.is_argmax else None
            if token is None or token in self.sampler.banned:
                row = rows.logits(index)
                token = self.sampler.choose(row, self.history, len(self.history)).token
            if self.config.n_probs is not None:
                row = rows.logits(index)
                self._chances.append(self.sampler.chances(row, self.history, token))
        return token

    def n_top(self, n_most: int) -> int:
        """How many best tokens of a row are all that a draw looks at; 0: more than n_most."""
        is_few = self.config.n_probs is None and 0 < self.sampler.n_best <= n_most
        return n_most if is_few else 0

    def new_step(self, n_drafted: int = 0, n_accepted: int = 0) -> Step:
        """What was added since the last call."""
        tokens = tuple(self.answer.tokens[self._n_given :])
        self._n_given += len(tokens)
        text, reasoning = self.answer.new_text()
        chances, self._chances = tuple(self._chances), []
        return Step(tokens, text, n_drafted, n_accepted, reasoning, chances)


class Generation:
    """An answer of a timeline of its own: iterate for its steps, `result()` for its account."""

    def __init__(
        self,
        timeline: Timeline,
        vocabulary: Vocabulary,
        prompt: Sequence[int],
        config: DecodeConfig,
        *,
        proposers: Sequence[Proposer] = (),
        rule: Rule | None = None,
        prefixes: Prefixes | None = None,
        on_prefill: Progress | None = None,
        cancelled: Callable[[], bool] | None = None,
        splitter: Splitter | None = None,
    ) -> None:
        """Computes nothing yet.

        proposers, rule: where candidates come from, and which of them are verified; without both,
            rounds are plain.
        prefixes: what the timeline may begin with, and where what it held before is kept; without,
            it goes back as far as it can.
        on_prefill: progress of the prefill, from 0 tokens on.
        cancelled: asked between micro-batches and tokens; True ends the answer.
        splitter: tells thoughts apart from the answer's text.
        Errors: ValueError for an empty prompt or one that does not fit into the context.
        """
        is_drafted = bool(proposers) and rule is not None
        self.config = config
        self._writing = writing = Writing(
            vocabulary,
            prompt,
            timeline.n_ctx,
            config,
            is_drafted=is_drafted,
            cancelled=cancelled,
            splitter=splitter,
        )
        self.history = writing.history
        self._timeline = timeline
        self._prefixes, self._held = prefixes, cast(Held, timeline)
        self._on_prefill = on_prefill
        self._request = Request(timeline, writing.history, writing.sampler)
        self._speculation: Speculation | None = None
        if proposers and rule is not None:
            self._speculation = Speculation(proposers, rule, writing.account.phase)
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
        return self._writing.result()

    def _run(self) -> Generator[Step, None, None]:
        writing = self._writing
        account, answer = writing.account, writing.answer
        started = time.perf_counter()
        engine = self._timeline.engine
        writing.has_top = engine.keep_top(writing.n_top(engine.n_most_top))
        try:
            rows = self._prefill()
        except _Cancelled:
            return
        except Error:
            self._distrust()
            raise
        finally:
            account.prefill_s = time.perf_counter() - started
        if self.config.max_tokens == 0:
            answer.stop_reason = "length"
            return
        started = time.perf_counter()
        try:
            ended = writing.take(writing.choose(rows, -1))
            account.prefill_s += time.perf_counter() - started
            yield writing.new_step()
            while not ended:
                yield self._step()
                ended = answer.stop_reason is not None
        except Error:
            self._distrust()
            raise

    def _distrust(self) -> None:
        if self._prefixes is not None:
            self._prefixes.forget_unproven()

    def _prefill(self) -> Rows:
        writing = self._writing

        def progress(done: int, total: int) -> None:
            if writing.cancelled():
                raise _Cancelled
            if self._on_prefill is not None:
                self._on_prefill(done, total)

        with writing.account.phase("prefill"):
            found = self._found()
            writing.n_cached, writing.n_draft_context = found.n_cached, found.n_draft_context
            if self._speculation is not None:
                self._speculation.begin(self._request)
            n, end = found.n_cached, len(writing.prompt)
            if self._on_prefill is not None:
                self._on_prefill(0, end - n)
            at = n
            while True:
                stop = found.next_stop(at, end)
                rows = self._timeline.prefill(
                    writing.prompt[at:stop],
                    lambda done, _, at=at: progress(at - n + done, end - n),  # type: ignore[misc]
                )
                if stop == end or self._prefixes is None:
                    return rows
                self._prefixes.keep(self._held)
                at = stop

    def _found(self) -> Found:
        """What the timeline begins with."""
        prompt, prefixes = self._writing.prompt, self._prefixes
        if prefixes is None:
            return Found(self._timeline.sync(prompt))
        is_fresh = not self._writing.config.cache_prompt
        found = prefixes.begin(self._held, prompt, self._writing.turns, is_fresh=is_fresh)
        prefixes.make_room(self._timeline.wanted_cells(len(prompt) - found.n_cached))
        return found

    def _step(self) -> Step:
        """One round: puts the last token, and what follows it, into the caches."""
        writing, timeline, request = self._writing, self._timeline, self._request
        account, answer, speculation = writing.account, writing.answer, self._speculation
        is_asked = speculation is not None and not speculation.n_rest
        n_before = len(answer.tokens)
        with account.round(len(self.history) - 1) as done:
            if speculation is not None and is_asked:
                request.n_room = min(timeline.engine.max_verify, timeline.n_ctx - done.position)
                request.n_left = answer.n_left
                speculation.propose(done, (request,))
            if self._prefixes is not None:
                n_rows = len(request.tree.tokens) if request.tree is not None else 1
                if (n_cells := timeline.wanted_cells(n_rows)) > 0:
                    self._prefixes.make_room(n_cells)
            if request.tree is not None:
                done.n_accepted = verify(
                    timeline, request.tree, writing.choose, writing.take, account.phase
                )
            else:
                with account.phase("decode"):
                    rows = timeline.decode(self.history[-1])
                writing.take(writing.choose(rows, -1))
            done.n_tokens = len(answer.tokens) - n_before
        tokens = tuple(answer.tokens[n_before:])
        if speculation is not None and is_asked:
            for credit in request.credits(tokens):
                account.credit(*credit)
            speculation.observe(done, (request,), (tokens,))
        elif speculation is not None:
            speculation.pass_over(done)
        return writing.new_step(done.n_drafted, done.n_accepted)


def check_prompt(prompt: Sequence[int], n_ctx: int) -> None:
    """ValueError unless the prompt has a token and fits into the context."""
    if not prompt:
        raise ValueError("the prompt is empty, it must hold at least one token")
    if len(prompt) > n_ctx:
        raise ValueError(f"the prompt has {len(prompt)} tokens, the context holds {n_ctx}")
