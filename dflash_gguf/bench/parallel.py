"""dflash-bench --parallel: speed of several answers at once, with and without drafts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ..config import DecodeConfig
from ..decoder import Decoder
from .runs import N_WARM
from .settings import Setting

N_RUNS = 3
"""Number of timed runs of each setting, after an untimed run that builds graphs."""


def measure(
    decoder: Decoder,
    pair: str,
    prompts: Sequence[Sequence[int]],
    settings: Sequence[Setting],
    numbers: Sequence[int],
    config: DecodeConfig,
) -> Iterator[dict[str, Any]]:
    """Yields a report for each number of parallel answers and setting. prompts: token ids.

    Each run starts with an empty prefix cache and suffix index, not to profit from earlier runs.
    """
    for n in numbers:
        seconds: dict[Setting, list[float]] = {setting: [] for setting in settings}
        tokens: dict[Setting, list[int]] = {setting: [] for setting in settings}
        for run in range(N_RUNS + 1):
            chosen = [prompts[(run * n + i) % len(prompts)] for i in range(n)]
            first = run % len(settings)
            max_tokens = N_WARM if run == 0 else config.max_tokens
            for setting in (*settings[first:], *settings[:first]):
                decoder.reset()
                started = time.perf_counter()
                fields = {**setting.fields, "max_tokens": max_tokens}
                results = decoder.generate_batch(chosen, config, **fields)
                if run:
                    seconds[setting].append(time.perf_counter() - started)
                    tokens[setting].append(sum(result.n_tokens for result in results))
        rates = {
            setting: [n / s for n, s in zip(tokens[setting], seconds[setting], strict=True)]
            for setting in settings
        }
        plain = next((rates[setting] for setting in settings if setting.kind == "none"), None)
        for setting in settings:
            ratio = None
            if plain is not None and setting.kind != "none":
                pairs = zip(rates[setting], plain, strict=True)
                ratio = round(statistics.median(a / b for a, b in pairs), 3)
            yield {
                "pair": pair,
                "n": n,
                "setting": str(setting),
                "tokens_per_s": round(statistics.median(rates[setting]), 2),
                "ratio": ratio,
            }


def table(entries: Sequence[dict[str, Any]]) -> str:
    """Formats the reports of `measure` as a Markdown table."""
    lines = ["| pair | answers at once | setting | tok/s of all | ratio to plain |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for e in entries:
        ratio = "" if e["ratio"] is None else f"{e['ratio']:.3f}"
        lines.append(
            f"| {e['pair']} | {e['n']} | {e['setting']} | {e['tokens_per_s']:.1f} | {ratio} |"
        )
    return "\n".join(lines)
