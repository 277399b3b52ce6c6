"""One answer in the making: what was drawn, how the next token is drawn, and its account."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..config import DecodeConfig
from ..outputs import Result, Step
from ..sampling.noise import TokenLogprobs
from ..sampling.sampler import Sampler
from ..speculative.speculator import RowsLike
from ..text.chat import ChatPrompt
from ..text.reasoning import Splitter
from .account import Account
from .answer import Answer, VocabularyLike


class Writing:
    """An answer as it is written, by whoever runs its rounds and gives it rows.

    `history` is the prompt and the answer so far: what penalties and the drafter's scores look at.
    What the caches hold of it is for a sequence to know.
    """

    def __init__(
        self,
        vocabulary: VocabularyLike,
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
        self.turn_boundaries = (
            tuple(prompt.turn_boundaries) if isinstance(prompt, ChatPrompt) else ()
        )
        self.n_ctx = n_ctx
        self.n_cached = self.n_draft_context = 0
        self.cancelled = cancelled or (lambda: False)
        banned = vocabulary.stop_tokens if config.ignore_eos else frozenset()
        self.sampler = Sampler(config, banned=banned | vocabulary.suppressed_tokens)
        self.answer = Answer(vocabulary, config, n_ctx - len(prompt), self.cancelled, splitter)
        self.account = Account(is_drafted)
        self._is_drafted = is_drafted
        self._logprobs: list[TokenLogprobs] = []
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
            candidates_by_proposer=dict(account.by_proposer),
            seconds_by_phase=account.seconds_by_phase,
        )

    def take(self, token: int) -> bool:
        """Adds a token to the answer; whether it ends it."""
        self.history.append(token)
        return self.answer.take(token)

    def choice_of(self, rows: RowsLike, drawn: Iterable[int]) -> Callable[[int], int]:
        """What gives the token after `history` for a row; to be asked in the order of a walk.

        drawn: these, as far as the core could draw them; the row that comes then is at fault, and
        reading it says why.
        """
        tokens = iter(drawn)

        def choose(index: int) -> int:
            token = next(tokens, None)
            if token is None:
                token = self.sampler.sample(
                    rows.logits(index), self.history, len(self.history)
                ).token
            if self.config.n_probs is not None:
                with self.account.phase("sample"):
                    row = rows.logits(index)
                    self._logprobs.append(self.sampler.logprobs(row, self.history, token))
            return token

        return choose

    def n_top(self, n_most: int) -> int:
        """How many best tokens of a row are all that a draw looks at; 0: more than n_most."""
        is_few = self.config.n_probs is None and 0 < self.sampler.n_best <= n_most
        return n_most if is_few else 0

    def new_step(self, n_drafted: int = 0, n_accepted: int = 0) -> Step:
        """What was added since the last call."""
        tokens = tuple(self.answer.tokens[self._n_given :])
        self._n_given += len(tokens)
        text, reasoning = self.answer.new_text()
        logprobs, self._logprobs = tuple(self._logprobs), []
        return Step(tokens, text, n_drafted, n_accepted, reasoning, logprobs)


def check_prompt(prompt: Sequence[int], n_ctx: int) -> None:
    """ValueError unless the prompt has a token and fits into the context."""
    if not prompt:
        raise ValueError("the prompt is empty, it must hold at least one token")
    if len(prompt) > n_ctx:
        raise ValueError(f"the prompt has {len(prompt)} tokens, the context holds {n_ctx}")
