"""Answers while they are generated, and their statistics in responses."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import DecodeConfig
from ..outputs import with_retired_names
from ..sampling.noise import TokenLogprobs
from ..text.reasoning import OutputPart, joined
from ..text.tools.calls import call_id, calls_in, message_call
from .messages import AskedPrompt, Prefilled, ResultStats, Stepped

Event = dict[str, Any]


@dataclass
class CompletionChoice:
    """Answer to one prompt, with the tokens and text received so far."""

    index: int
    prompt: AskedPrompt
    config: DecodeConfig
    prompt_index: int = 0
    """Index of the answered prompt among the request's prompts."""
    batch: int = 2048
    """Prompt tokens between two progress events of a stream."""
    slot: int = -1
    tokens: list[int] = field(default_factory=list)
    n_reasoning_tokens: int = 0
    """Tokens of the rounds that brought reasoning alone."""
    parts: list[OutputPart] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens but the first, if the request echoes them."""
    stats: ResultStats | None = None
    began: float = field(default_factory=time.monotonic)
    _reported: int = -1
    _unique: list[str] = field(default_factory=list)

    def add(self, step: Stepped, *, is_stream: bool) -> None:
        """Appends the tokens, text and log-probabilities of one round to the answer.

        is_stream: True to leave out log-probabilities, which a stream has sent by then.
        """
        self.tokens += step.tokens
        self.parts += step.parts
        if step.parts and all(part.kind == "reasoning" for part in step.parts):
            self.n_reasoning_tokens += len(step.tokens)
        self.logprobs += [] if is_stream else step.logprobs
        self.stats = step.stats or self.stats

    @property
    def text(self) -> str:
        """Text of the answer so far, without reasoning."""
        return joined(self.parts, "text")

    @property
    def reasoning(self) -> str:
        """Reasoning of the answer so far."""
        return joined(self.parts, "reasoning")

    def progress(self, message: Prefilled) -> Event | None:
        """Returns a progress event at the start, every `batch` prompt tokens, and at the end."""
        is_last = message.done == message.total
        if not (self._reported < 0 or message.done >= self._reported + self.batch or is_last):
            return None
        if message.done == self._reported:
            return None
        self._reported = message.done
        n_cached = len(self.prompt.tokens) - message.total
        return {
            "total": len(self.prompt.tokens),
            "cache": n_cached,
            "processed": n_cached + message.done,
            "time_ms": round(1e3 * (time.monotonic() - self.began)) if message.done else 0,
        }

    @property
    def finish_reason(self) -> str:
        """Reason why the answer ended, in OpenAI's terms: "stop", "length" or "tool_calls"."""
        reason = self.stats.stop_reason if self.stats else None
        if reason in ("length", "context"):
            return "length"
        return "tool_calls" if any(part.kind == "call" for part in self.parts) else "stop"

    def call_id(self, index: int, name: str) -> str:
        """Returns the id of a call of the answer, the same at each call of this method."""
        while len(self._unique) <= index:
            self._unique.append(secrets.token_hex(12))
        return call_id(self.prompt.tools, name, index, self._unique[index])

    @property
    def tool_calls(self) -> list[Event]:
        """Tool calls of the answer so far, in the form of OpenAI's messages."""
        calls = enumerate(calls_in(self.parts))
        return [
            message_call(name, arguments, self.call_id(index, name))
            for index, (name, arguments) in calls
        ]


def timings_of(stats: ResultStats) -> dict[str, Any]:
    """Returns llama-server's `timings`, and this project's own statistics as `dflash`."""
    n_prompt, n_tokens = stats.n_prefilled, stats.n_tokens
    prompt_ms, predicted_ms = 1e3 * stats.prefill_s, 1e3 * stats.decode_s
    timings: dict[str, Any] = {
        "cache_n": stats.n_cached,
        "prompt_n": n_prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": ratio(prompt_ms, n_prompt),
        "prompt_per_second": ratio(1e3 * n_prompt, prompt_ms),
        "predicted_n": n_tokens,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": ratio(predicted_ms, stats.n_decoded),
        "predicted_per_second": ratio(1e3 * stats.n_decoded, predicted_ms),
    }
    if stats.draft != "none":
        timings |= {"draft_n": stats.n_drafted, "draft_n_accepted": stats.n_accepted}
    phases = {name: round(1e3 * s, 3) for name, s in stats.seconds_by_phase.items()}
    ours = {
        "rounds": stats.rounds,
        "tokens_per_round": round(ratio(stats.n_decoded, stats.rounds), 3),
        "rounds_by_draft": stats.rounds_by_draft,
        "candidates_by_proposer": {
            name: {"n_drafted": n, "n_accepted": n_accepted}
            for name, (n, n_accepted) in stats.candidates_by_proposer.items()
        },
        "ms_by_phase": phases,
        "phase_ms": with_retired_names(phases),
    }
    return {"timings": timings, "dflash": ours}


def usage(choices: Sequence[CompletionChoice]) -> dict[str, Any]:
    """Returns OpenAI's `usage` object; a prompt with several answers counts once."""
    stats = [choice.stats for choice in choices if choice.stats is not None]
    prompts = {choice.prompt_index: len(choice.prompt.tokens) for choice in choices}
    cached = {
        choice.prompt_index: choice.stats.n_cached
        for choice in reversed(choices)
        if choice.stats is not None
    }
    n_prompt, n_tokens = sum(prompts.values()), sum(stats.n_tokens for stats in stats)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_tokens,
        "total_tokens": n_prompt + n_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
    }


def meta_info(choices: Sequence[CompletionChoice]) -> dict[str, Any]:
    """Returns SGLang's `meta_info`: rounds and mean tokens per round; empty without drafts."""
    stats = [choice.stats for choice in choices if choice.stats is not None]
    drafted = [stats for stats in stats if stats.draft != "none" and stats.rounds]
    if not drafted:
        return {}
    n_rounds = sum(stats.rounds for stats in drafted)
    n_tokens = sum(stats.n_decoded for stats in drafted)
    return {"spec_verify_ct": n_rounds, "spec_accept_length": n_tokens / n_rounds}


def progressed(choice: CompletionChoice, progress: Event) -> Event:
    """Returns a progress event with `timings` of the prompt tokens computed so far."""
    done = progress["processed"] - progress["cache"]
    seconds = progress["time_ms"] / 1e3
    n_cached = progress["cache"] if done else 0
    counts = (done, done, n_cached, 0, 0, 0, 0.0, seconds, 0.0)
    stats = ResultStats(*counts, "", None, 0, choice.config.draft, 0, 0, {}, None, {})
    return {"prompt_progress": progress, "timings": timings_of(stats)["timings"]}


def ratio(value: float, by: float) -> float:
    """Returns value / by, 0 if `by` is 0."""
    return value / by if by > 0 else 0.0
