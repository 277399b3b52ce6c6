"""One answer as far as it has come, and what is counted of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import DecodeConfig
from ..sampling.noise import TokenLogprobs
from .messages import Account, Prefilled, Run, Stepped

Event = dict[str, Any]
"""An object of JSON."""


@dataclass
class Choice:
    """One answer as far as it has come."""

    index: int
    run: Run
    config: DecodeConfig
    prompt: int = 0
    """Number of the prompt that it answers."""
    batch: int = 2048
    """Prompt tokens between two reports of progress."""
    slot: int = -1
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    account: Account | None = None
    began: float = field(default_factory=time.monotonic)
    _reported: int = -1

    def add(self, step: Stepped) -> None:
        """Takes what a round added."""
        self.tokens += step.tokens
        self.text.append(step.text)
        self.reasoning.append(step.reasoning)
        self.logprobs += step.logprobs
        self.account = step.account or self.account

    def progress(self, message: Prefilled) -> Event | None:
        """How far the prompt is; None where that is no news."""
        is_last = message.done == message.total
        if not (self._reported < 0 or message.done >= self._reported + self.batch or is_last):
            return None
        if message.done == self._reported:
            return None
        self._reported = message.done
        n_cached = len(self.run.tokens) - message.total
        return {
            "total": len(self.run.tokens),
            "cache": n_cached,
            "processed": n_cached + message.done,
            "time_ms": round(1e3 * (time.monotonic() - self.began)) if message.done else 0,
        }

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for what ended it."""
        reason = self.account.stop_reason if self.account else None
        return "length" if reason in ("length", "context") else "stop"


def timed(account: Account) -> dict[str, Any]:
    """`timings`, counts and speeds as llama-server has them, and what it has not under `dflash`."""
    n_prompt, n_tokens = account.n_prefilled, account.n_tokens
    prompt_ms, predicted_ms = 1e3 * account.prefill_s, 1e3 * account.decode_s
    found: dict[str, Any] = {
        "cache_n": account.n_prompt - n_prompt,
        "prompt_n": n_prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, n_prompt),
        "prompt_per_second": _ratio(1e3 * n_prompt, prompt_ms),
        "predicted_n": n_tokens,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, account.n_decoded),
        "predicted_per_second": _ratio(1e3 * account.n_decoded, predicted_ms),
    }
    if account.draft != "none":
        found |= {"draft_n": account.n_drafted, "draft_n_accepted": account.n_accepted}
    ours = {
        "rounds": account.rounds,
        "tokens_per_round": round(_ratio(account.n_decoded, account.rounds), 3),
        "rounds_by_draft": account.rounds_by_draft,
        "phase_ms": {name: round(1e3 * s, 3) for name, s in account.phase_s.items()},
    }
    return {"timings": found, "dflash": ours}


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens of all choices; a prompt that several answer counts once."""
    accounts = [choice.account for choice in choices if choice.account is not None]
    prompts = {choice.prompt: len(choice.run.tokens) for choice in choices}
    cached = {
        choice.prompt: choice.account.n_prompt - choice.account.n_prefilled
        for choice in reversed(choices)
        if choice.account is not None
    }
    n_prompt, n_tokens = sum(prompts.values()), sum(account.n_tokens for account in accounts)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_tokens,
        "total_tokens": n_prompt + n_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
    }


def meta_info(choices: Sequence[Choice]) -> dict[str, Any]:
    """Rounds of all choices and the tokens of one, by SGLang's names; nothing without drafts."""
    accounts = [choice.account for choice in choices if choice.account is not None]
    drafted = [account for account in accounts if account.draft != "none" and account.rounds]
    if not drafted:
        return {}
    n_rounds = sum(account.rounds for account in drafted)
    n_tokens = sum(account.n_decoded for account in drafted)
    return {"spec_verify_ct": n_rounds, "spec_accept_length": n_tokens / n_rounds}


def progressed(choice: Choice, progress: Event) -> Event:
    """Where a prompt is, with `timings` of that much; all 0 before any work."""
    done = progress["processed"] - progress["cache"]
    seconds = progress["time_ms"] / 1e3
    found = timed(
        Account(done, done, 0, 0, 0, seconds, 0.0, "", None, 0, choice.config.draft, 0, 0, {}, None)
    )["timings"]
    found["cache_n"] = progress["cache"] if done else 0
    return {"prompt_progress": progress, "timings": found}


def _ratio(value: float, by: float) -> float:
    return value / by if by > 0 else 0.0
