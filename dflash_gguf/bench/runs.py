"""Runs every setting on every prompt, in changing order."""

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
"""Tokens of each setting's warm-up answer, which builds graphs."""


@dataclass(frozen=True, slots=True)
class BenchmarkRun:
    """Answer of a setting to a prompt. n_equal: first tokens in common with the plain answer."""

    pair: str
    prompt: str
    setting: str
    number: int
    """Index of the prompt in the list that repeats all prompts --runs times."""
    result: Result
    n_equal: int | None

    def to_dict(self) -> dict[str, Any]:
        """Returns this run's line of the JSON report as a dict."""
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
    """Yields an answer for every prompt and setting. prompts: names and token ids.

    Each prompt is cached before the settings run, so that all of them compute its last token alone:
    in a longer pass the logits could differ in the last bits.
    """
    for setting in settings:
        decoder.generate(prompts[0][1], config, **{**setting.fields, "max_tokens": N_WARM})
    for number, (name, tokens) in enumerate(prompts):
        decoder.generate(tokens, config, draft="none", max_tokens=1)
        first = number % len(settings)
        results = {}
        for setting in (*settings[first:], *settings[:first]):
            decoder.forget_texts()  # else the suffix index proposes the previous setting's answer
            results[str(setting)] = decoder.generate(tokens, config, **setting.fields)
        plain = results.get("none")
        for setting_name in map(str, settings):
            result = results[setting_name]
            n_equal = None if plain is None else n_common(result.tokens, plain.tokens)
            yield BenchmarkRun(pair, name, setting_name, number, result, n_equal)
