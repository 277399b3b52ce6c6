"""A request: its prompt and settings (`Request`), and its progress (`RequestState`)."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..config import DecodeConfig
from ..constraints.matcher import AnswerConstraint
from ..kv_cache.prefix_cache import PrefixHit
from ..native import Progress
from ..native import Sequence as KvSequence
from ..outputs import Result, Step
from ..sampling.noise import TokenLogprobs
from ..sampling.sampler import Sampler
from ..speculative.proposers.proposer import SpeculativeState
from ..speculative.speculator import Speculator
from ..text.reasoning import Format
from ..text.tools.calls import call_id, calls_in, message_call
from ..text.tools.parser import ToolFormat
from .output_processor import OutputProcessor, VocabularyLike
from .stats import RequestStats

if TYPE_CHECKING:
    from ..constraints.compiler import CompiledConstraint

MAX_UNREAD_TOKENS = 256
"""Number of unread tokens at which a request is throttled."""
MAX_UNREAD_CHANCES = 1 << 15
"""Number of unread log-probabilities, about 130 bytes each, at which a request is throttled."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt and the settings of its answer. Use `Decoder.request`, which validates both."""

    prompt: tuple[int, ...]
    config: DecodeConfig
    reasoning: Format | None = None
    """Reasoning markers of the answer; None if the chat template has none."""
    turn_boundaries: tuple[int, ...] = ()
    """Positions where a later prompt of the conversation may diverge from this prompt."""
    scope: str = ""
    """Name of the requests that may reuse this text, in cached prefixes and in drafts."""
    client: str = ""
    """Name of who asked: clients take turns."""
    tools: ToolFormat | None = None
    """Tools that the answer may call; None for none."""
    constraint: CompiledConstraint | None = None
    """Compiled constraint of the answer; None if it is free."""


class RequestStatus(Enum):
    """Status of a request in the scheduler."""

    WAITING = "waiting"
    """The request has no KV sequence yet, or lost it to older requests."""
    PREFILLING = "prefilling"
    """Tokens of the request before its last token must still be computed."""
    DECODING = "decoding"
    THROTTLED = "throttled"
    """The request computes nothing until the reader of its answer has caught up."""
    FINISHED = "finished"


class RequestState(SpeculativeState):
    """The progress of one request; between batches its K/V sequence lacks the last token."""

    history: list[int]
    constraint: AnswerConstraint | None

    def __init__(
        self,
        request: Request,
        vocabulary: VocabularyLike,
        n_ctx: int,
        speculator: Speculator | None = None,
        cancelled: Callable[[], bool] | None = None,
        on_prefill: Progress | None = None,
    ) -> None:
        """Creates the state of a waiting request.

        n_ctx: maximum tokens of prompt and answer. speculator: None for plain decoding. cancelled:
        called before every batch; True ends the request. on_prefill: called with (done, all) tokens
        of the uncached part of the prompt, from (0, n) on.
        """
        config = request.config
        banned = vocabulary.stop_tokens if config.ignore_eos else frozenset()
        self.sampler = Sampler(config, banned=banned | vocabulary.suppressed_tokens)
        super().__init__(None, list(request.prompt), self.sampler.scorer)
        self.core_sampler = self.sampler.core
        self.request = request
        if request.constraint is not None:
            binds_all = request.tools is not None and request.tools.binds_reasoning
            reasoning = None if binds_all else request.reasoning
            self.constraint = AnswerConstraint(request.constraint, reasoning)
        # A request without cache_prompt has a scope of its own, which its end forgets.
        self.scope = request.scope if config.cache_prompt else object()
        self.output = OutputProcessor(
            vocabulary, config, n_ctx - len(request.prompt), request.reasoning, request.tools
        )
        self.stats = RequestStats(is_drafted=speculator is not None)
        self.speculator = speculator
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.steps: list[Step] = []
        self.error: BaseException | None = None
        self.is_finished = False
        self.prefix_hit = PrefixHit()
        self.n_cached = self.n_draft_context = 0
        self.n_to_prefill = self.n_prefilled = 0
        self.n_top = 0
        """Number of a row's best tokens that suffice for sampling; 0 if the whole row is needed."""
        self.added = time.perf_counter()
        self.prefill_started: float | None = None
        self.turn = 0
        """Serial number of the turn in which the request got its sequence, or lost it."""
        self.turn_began: float | None = None
        """Time since which others wait while this request computes new tokens; None: not yet."""
        self.n_reached = 0
        """Number of tokens that earlier turns computed."""
        self._cancelled, self._on_prefill = cancelled, on_prefill

    @property
    def status(self) -> RequestStatus:
        """Status of the request, derived from its other fields."""
        if self.is_finished:
            return RequestStatus.FINISHED
        if self.is_throttled:
            return RequestStatus.THROTTLED
        if self.sequence is None:
            return RequestStatus.WAITING
        return RequestStatus.DECODING if self.is_decoding else RequestStatus.PREFILLING

    @property
    def is_decoding(self) -> bool:
        """True if the sequence holds all tokens of the request but the last sampled one."""
        return bool(self.output.tokens) and self.sequence.position == len(self.history) - 1

    @property
    def n_uncomputed(self) -> int:
        """Number of tokens of prompt and answer that a running request's sequence lacks."""
        return len(self.history) - int(self.sequence.position)

    @property
    def is_throttled(self) -> bool:
        """True if the reader is MAX_UNREAD_TOKENS or MAX_UNREAD_CHANCES behind the answer."""
        if not self.steps:
            return False
        n_tokens = sum([len(step.tokens) for step in self.steps])
        n_chances = n_tokens * (self.request.config.n_probs or 0)
        return n_tokens >= MAX_UNREAD_TOKENS or n_chances >= MAX_UNREAD_CHANCES

    @property
    def n_rows(self) -> int:
        """Number of rows that a decoding request has in the next batch."""
        return 1 if self.tree is None else len(self.tree.tokens)

    def begin(self, sequence: KvSequence, hit: PrefixHit) -> None:
        """Assigns a KV sequence that already holds a cached prefix of the request's history."""
        self.prefix_hit, self.turn_began = hit, None
        if not self.n_to_prefill:
            self.n_cached, self.n_draft_context = hit.n_cached, hit.n_draft_context
            self.n_to_prefill = len(self.history) - hit.n_cached
            self._report_prefill(0)
        self.sequence = sequence

    def end_prefill_chunk(self, position: int, sample_s: float) -> None:
        """Records a prefill chunk that ended at `position`, before the answer's first token."""
        assert self.prefill_started is not None
        self.stats.set_prefill(time.perf_counter() - self.prefill_started, sample_s)
        n_done = min(position - self.n_cached, len(self.request.prompt) - self.n_cached)
        self.n_prefilled = max(self.n_prefilled, n_done)
        self._report_prefill(min(max(position - self.n_cached, 0), self.n_to_prefill))

    @property
    def is_scored(self) -> bool:
        """False while log-probabilities of the prompt's tokens are wanted and not complete."""
        wanted = len(self.request.prompt) - 1 if self.request.config.prompt_logprobs else 0
        return len(self.prompt_logprobs) >= wanted

    def score(self, position: int, rows: NDArray[np.float32]) -> None:
        """Takes the logits of prompt tokens from `position` on, for the tokens behind them."""
        prompt, config = self.request.prompt, self.request.config
        for at, row in enumerate(rows, position + 1):
            # A preempted request computes some rows again: only the next missing token counts.
            if at == len(self.prompt_logprobs) + 1 and at < len(prompt):
                history = prompt[:at] if config.post_sampling_probs else ()
                found = self.sampler.logprobs(row, history, prompt[at])
                self.prompt_logprobs.append(found)

    def is_cancelled(self) -> bool:
        """Returns True if the request must end; keeps a callback's exception for the reader."""
        try:
            return self.error is not None or (self._cancelled is not None and self._cancelled())
        except BaseException as error:
            self.error = error
            return True

    def rewind(self, n_tokens: int) -> None:
        """Drops all but the first n_tokens tokens of the answer, which no reader has seen yet."""
        del self.history[len(self.request.prompt) + n_tokens :]
        self.output.rewind(n_tokens)
        del self.logprobs[self.output.n_new :]

    def take(self, token: int) -> bool:
        """Appends a token to the answer; returns True if the token ends the answer."""
        self.history.append(token)
        return self.output.push(token)

    def add_step(self, n_drafted: int = 0, n_accepted: int = 0) -> None:
        """Gives the reader a step with all tokens and text since the last step."""
        tokens, parts = self.output.take_new()
        logprobs, self.logprobs = tuple(self.logprobs), []
        self.steps.append(Step(tokens, parts, n_drafted, n_accepted, logprobs))

    def result(self) -> Result:
        """Returns the result so far, which is final once the request has finished."""
        output, stats, request = self.output, self.stats, self.request
        is_drafted = self.speculator is not None
        return Result(
            tokens=tuple(output.tokens),
            text=output.text,
            reasoning=output.reasoning,
            tool_calls=self._tool_calls(),
            n_prompt=len(request.prompt),
            n_prefilled=self.n_prefilled,
            n_cached=self.n_cached,
            n_draft_context=self.n_draft_context,
            n_decoded=stats.n_decoded,
            rounds=stats.rounds,
            n_passes=stats.n_passes,
            prefill_s=stats.prefill_s,
            decode_s=stats.decode_s,
            stop_reason=output.stop_reason or ("cancelled" if self.is_finished else "unfinished"),
            stop_text=output.stop_text,
            draft=request.config.draft if is_drafted else "none",
            seed=self.sampler.seed,
            n_drafted=stats.n_drafted,
            accept_histogram=stats.accept_histogram,
            rounds_by_draft=dict(stats.rounds_by_draft) if is_drafted else None,
            candidates_by_proposer=dict(stats.by_proposer),
            seconds_by_phase=stats.seconds_by_phase,
            prompt_logprobs=tuple(self.prompt_logprobs),
        )

    def _tool_calls(self) -> tuple[dict[str, Any], ...]:
        """Returns the calls of the answer so far. Their ids stay the same as the answer grows."""
        tools = self.request.tools
        if tools is None:
            return ()
        calls = []
        for index, (name, arguments) in enumerate(calls_in(self.output.parts)):
            text = f"{len(self.request.prompt)} {self.sampler.seed} {index} {name}"
            unique = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=12).hexdigest()
            calls.append(message_call(name, arguments, call_id(tools, name, index, unique)))
        return tuple(calls)

    def _report_prefill(self, n_done: int) -> None:
        try:
            if self._on_prefill is not None:
                self._on_prefill(n_done, self.n_to_prefill)
        except BaseException as error:
            self.error = error


def check_prompt(prompt: Sequence[int], n_ctx: int) -> None:
    """Raises ValueError if the prompt is empty or longer than n_ctx tokens."""
    if not prompt:
        raise ValueError("the prompt is empty, it must hold at least one token")
    if len(prompt) > n_ctx:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, the context holds {n_ctx}; "
            "shorten the prompt or raise n_ctx"
        )
