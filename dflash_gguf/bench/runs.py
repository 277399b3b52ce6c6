"""Answers of every setting to every prompt, one after the other in changing order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import DecodeConfig
from ..decoder import Decoder
from ..outputs import Result
from ..text.stream import n_common
from .settings import Setting

N_WARM = 24
"""Tokens of the answers before the first that counts: they build graphs and warm kernels."""


@dataclass(frozen=True, slots=True)
class BenchmarkRun:
    """One answer. n_equal: tokens that it has in common with plain decoding's, from the first."""

    pair: str
    prompt: str
    setting: str
    result: Result
    n_equal: int | None

    def to_dict(self) -> dict[str, Any]:
        """Formats one line of the report."""
        report = self.result.to_dict()
        kept = (
            *("n_prompt", "n_tokens", "tokens_per_s", "rounds", "tau", "accept_histogram"),
            *("rounds_by_draft", "ms_by_phase", "phase_ms", "n_drafted", "n_accepted", "seed"),
            *("model", "drafter", "backend", "threads", "stop_reason"),
        )
        return {
            "pair": self.pair,
            "prompt": self.prompt,
            "setting": self.setting,
            "n_equal": self.n_equal,
            **{name: report[name] for name in kept},
        }


def compare(
    decoder: Decoder,
    pair: str,
    prompts: Sequence[tuple[str, Sequence[int]]],
    settings: Sequence[Setting],
    config: DecodeConfig,
) -> Iterator[BenchmarkRun]:
    """Runs everything. prompts: names and token ids. config: all but what is drafted.

    The prompt is computed before all of them and kept, so that rounds are what differs: its last
    token, which each computes again, would have other bits in a pass with the tokens before it.
    """
    for setting in settings:
        decoder.generate(prompts[0][1], config, **{**setting.fields, "max_tokens": N_WARM})
    for number, (name, tokens) in enumerate(prompts):
        decoder.generate(tokens, config, draft="none", max_tokens=1)
        first = number % len(settings)
        results = {}
        for setting in (*settings[first:], *settings[:first]):
            decoder.forget_texts()  # else it proposes the setting before it
            results[str(setting)] = decoder.generate(tokens, config, **setting.fields)
        plain = results.get("none")
        for setting_name in map(str, settings):
            result = results[setting_name]
            n_equal = None if plain is None else n_common(result.tokens, plain.tokens)
            yield BenchmarkRun(pair, name, setting_name, result, n_equal)
