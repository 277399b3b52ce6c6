"""Results of generation: one step of a stream, and the report of an answer."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .sampling.noise import TokenLogprobs
from .text.reasoning import OutputPart, joined

RETIRED_NAMES = {"select": "tree", "overhead": "host", "suffix": "copy"}
"""Retired names of phases and proposers, which reports keep for one more release."""


def with_retired_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a mapping by phase or proposer with retired names as its keys."""
    return {RETIRED_NAMES.get(name, name): value for name, value in values.items()}


class Step(NamedTuple):
    """Tokens and text that one round added to an answer.

    tokens: sampled token ids in order, with a stop token.
    parts: new pieces of text, reasoning and tool calls, in order. They may lag behind the tokens
        while a character is incomplete, or a stop text or a tool call may have begun.
    n_drafted, n_accepted: candidates verified in the round, and those accepted.
    logprobs: an entry for each token if n_probs is set, else empty.
    """

    tokens: tuple[int, ...]
    parts: tuple[OutputPart, ...] = ()
    n_drafted: int = 0
    n_accepted: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def text(self) -> str:
        """The new text of the answer, without reasoning."""
        return joined(self.parts, "text")

    @property
    def reasoning(self) -> str:
        """The new reasoning, see `Result.reasoning`."""
        return joined(self.parts, "reasoning")

    @property
    def chances(self) -> tuple[TokenLogprobs, ...]:
        """Retired name of `logprobs`, kept for one more release."""
        return self.logprobs


@dataclass(frozen=True, slots=True)
class Result:
    """The report of one answer. Rates are properties, None where undefined.

    tokens: all sampled ids, with the stop token or the tokens of a stop text.
    text: the answer without stop token and stop text.
    reasoning: the reasoning before the answer to a conversation, which is then not in the text;
        None if the chat template marks no reasoning, or the prompt is no conversation.
    tool_calls: the calls of tools that the conversation offers, in the form of a message's
        tool_calls; the arguments are JSON text as the model wrote it, and may be malformed.
    n_prompt: tokens of the prompt: n_cached from the prefix cache and, unless the answer was ended
        within the prompt, n_prefilled computed ones. n_draft_context: the last cached tokens whose
        drafter K/V were cached too.
    n_decoded: tokens sampled in rounds; the first token comes from the prefill.
    rounds: target passes after the prefill. n_passes: the same, but a pass that k requests shared
        counts 1/k. prefill_s, decode_s: seconds of prefill and of rounds.
    draft: draft mode of the settings; "none" for plain decoding.
    n_drafted: candidates verified in all rounds.
    accept_histogram: number of rounds by the number of accepted candidates, as a list from 0 on;
        None for plain decoding.
    rounds_by_draft: number of rounds by draft: "none", "chain N" or "tree N" with N candidates;
        None for plain decoding.
    candidates_by_proposer: pairs of verified and accepted candidates, by proposer ("dflash",
        "suffix"); a candidate of several proposers counts for each.
    seconds_by_phase: prefill; decode (passes without candidates); choose (deciding whether to
        draft); draft; select (choosing nodes); verify; commit; sample; overhead (all other time).
    stop_reason: "token", "text", "length", "context" or "cancelled"; "call" after the only tool
        call that was allowed; "unfinished" for a stream that was not read to its end.
    stop_text: the stop text that ended the answer.
    kernels, drafter_kernels: bytes of weights by the kernels that multiply with them.
    logprobs: an entry for each token if n_probs is set, else empty. prompt_logprobs: an entry for
        each token of the prompt but the first, if the setting prompt_logprobs is.
    """

    tokens: tuple[int, ...]
    text: str
    n_prompt: int
    n_prefilled: int
    n_decoded: int
    rounds: int
    prefill_s: float
    decode_s: float
    stop_reason: str
    draft: str
    seed: int
    n_drafted: int = 0
    accept_histogram: tuple[int, ...] | None = None
    rounds_by_draft: Mapping[str, int] | None = None
    candidates_by_proposer: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    seconds_by_phase: Mapping[str, float] = field(default_factory=dict)
    model: str | None = None
    drafter: str | None = None
    backend: str | None = None
    kernels: Mapping[str, int] | None = None
    drafter_kernels: Mapping[str, int] | None = None
    threads: int | None = None
    reasoning: str | None = None
    stop_text: str | None = None
    n_cached: int = 0
    n_draft_context: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    n_passes: float = 0.0
    tool_calls: tuple[dict[str, Any], ...] = ()

    @property
    def by_proposer(self) -> dict[str, tuple[int, int]]:
        """Candidates by the proposers' retired names, kept for one more release."""
        return with_retired_names(self.candidates_by_proposer)

    @property
    def phase_s(self) -> dict[str, float]:
        """Seconds by the phases' retired names, kept for one more release."""
        return with_retired_names(self.seconds_by_phase)

    @property
    def n_tokens(self) -> int:
        """Number of sampled tokens."""
        return len(self.tokens)

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Computed prompt tokens per second of prefill."""
        return _rate(self.n_prefilled, self.prefill_s)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens sampled in rounds, per second of rounds."""
        return _rate(self.n_decoded, self.decode_s)

    @property
    def n_accepted(self) -> int:
        """Accepted candidates of all rounds."""
        return sum(i * rounds for i, rounds in enumerate(self.accept_histogram or ()))

    @property
    def tau(self) -> float | None:
        """Mean tokens per round, the target's own included; None for plain decoding or no round."""
        if self.accept_histogram is None or not self.rounds:
            return None
        return self.n_decoded / self.rounds

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON-ready values: phases in ms, retired names beside new ones."""
        candidates = {
            name: {"n_drafted": drafted, "n_accepted": accepted}
            for name, (drafted, accepted) in self.candidates_by_proposer.items()
        }
        phases = {name: _rounded(1e3 * s) for name, s in self.seconds_by_phase.items()}
        return {
            "text": self.text,
            "reasoning": self.reasoning,
            "tool_calls": list(self.tool_calls),
            "tokens": list(self.tokens),
            "n_prompt": self.n_prompt,
            "n_prefilled": self.n_prefilled,
            "n_cached": self.n_cached,
            "n_draft_context": self.n_draft_context,
            "n_tokens": self.n_tokens,
            "n_decoded": self.n_decoded,
            "n_passes": _rounded(self.n_passes),
            "prefill_s": _rounded(self.prefill_s),
            "decode_s": _rounded(self.decode_s),
            "prefill_tokens_per_s": _rounded(self.prefill_tokens_per_s),
            "tokens_per_s": _rounded(self.tokens_per_s),
            "rounds": self.rounds,
            "tau": _rounded(self.tau),
            "accept_histogram": (
                None if self.accept_histogram is None else list(self.accept_histogram)
            ),
            "rounds_by_draft": (
                None if self.rounds_by_draft is None else dict(self.rounds_by_draft)
            ),
            "candidates_by_proposer": candidates,
            "by_proposer": with_retired_names(candidates),
            "ms_by_phase": phases,
            "phase_ms": with_retired_names(phases),
            "draft": self.draft,
            "n_drafted": self.n_drafted,
            "n_accepted": self.n_accepted,
            "seed": self.seed,
            "model": self.model,
            "drafter": self.drafter,
            "backend": self.backend,
            "kernels": None if self.kernels is None else dict(self.kernels),
            "drafter_kernels": (
                None if self.drafter_kernels is None else dict(self.drafter_kernels)
            ),
            "threads": self.threads,
            "stop_reason": self.stop_reason,
            "stop_text": self.stop_text,
            "logprobs": _entries(self.logprobs),
            "prompt_logprobs": _entries(self.prompt_logprobs),
        }

    def to_json(self) -> str:
        """Returns the report as one JSON object on one line."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)


def _entries(logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    return [
        {"log_prob": _finite(one.log_prob), "top": [(i, _finite(x)) for i, x in one.top]}
        for one in logprobs
    ]


def _finite(log_prob: float) -> float | None:
    return None if log_prob == -math.inf else round(log_prob, 6)


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
