"""Tables of measurements: medians, and ratios to plain decoding with confidence intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..engine.stats import PHASES
from ..outputs import with_retired_names
from .runs import BenchmarkRun

N_BOOTSTRAP = 2000


def ratio_interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Returns the geometric mean of ratios, and the ends of its 95 % bootstrap interval."""
    logs = np.log(ratios)
    draws = np.random.default_rng(0).choice(logs, (N_BOOTSTRAP, len(logs))).mean(axis=1)
    low, high = np.quantile(draws, (0.025, 0.975))
    return float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high))


def by_setting(runs: Sequence[BenchmarkRun]) -> list[dict[str, Any]]:
    """Summarises runs by model pair and setting, in order of first appearance."""
    entries = []
    for pair, setting in dict.fromkeys((run.pair, run.setting) for run in runs):
        mine = [run for run in runs if (run.pair, run.setting) == (pair, setting)]
        plain = {r.number: r.result for r in runs if (r.pair, r.setting) == (pair, "none")}
        rates = [(r.result.tokens_per_s or 0.0, plain.get(r.number)) for r in mine]
        ratios = [a / b.tokens_per_s for a, b in rates if a and b and b.tokens_per_s]
        rounds = max(sum(r.result.rounds for r in mine), 1)
        tokens = sum(r.result.n_decoded for r in mine)
        phases = {
            name: 1e3 * sum(r.result.seconds_by_phase.get(name, 0.0) for r in mine) / rounds
            for name in PHASES
        }
        shown = {name: round(ms, 3) for name, ms in phases.items() if ms}
        entries.append(
            {
                "pair": pair,
                "setting": setting,
                "prompts": len(mine),
                "tokens_per_s": round(float(np.median([rate for rate, _ in rates])), 2),
                "ratio": [round(x, 3) for x in ratio_interval(ratios)] if ratios else None,
                "tau": round(tokens / rounds, 3),
                "drafted": sum(r.result.n_drafted for r in mine),
                "accepted": sum(r.result.n_accepted for r in mine),
                "ms_per_round": shown,
                "ms_a_round": with_retired_names(shown),
                "rounds": _rounds(mine),
                "equal": sum(r.n_equal == r.result.n_tokens for r in mine if r.n_equal is not None),
            }
        )
    return entries


def by_class(runs: Sequence[BenchmarkRun]) -> list[dict[str, Any]]:
    """Summarises runs by prompt file, pair and setting."""
    entries = []
    for name in dict.fromkeys(class_of(run) for run in runs):
        mine = by_setting([run for run in runs if class_of(run) == name])
        entries += [{"class": name, **entry} for entry in mine]
    return entries


def class_of(run: BenchmarkRun) -> str:
    """Returns the prompt file of a run, whose prompt is named by file and number ("file 12")."""
    return run.prompt.rpartition(" ")[0]


def sweep_table(entries: Sequence[dict[str, Any]]) -> str:
    """Formats a Markdown table of pairs by prompt files: tokens per second and ratios."""
    classes = list(dict.fromkeys(entry["class"] for entry in entries))
    rows = list(dict.fromkeys((entry["pair"], entry["setting"]) for entry in entries))
    lines = [f"| pair | setting | {' | '.join(classes)} |", "| --- " * (2 + len(classes)) + "|"]
    of = {(e["pair"], e["setting"], e["class"]): e for e in entries}
    for pair, setting in rows:
        cells = [_cell(of[pair, setting, name]) for name in classes]
        lines.append(f"| {pair} | {setting} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(entry: dict[str, Any]) -> str:
    if entry["setting"] == "none" or entry["ratio"] is None:
        return f"{entry['tokens_per_s']:.1f} tok/s"
    return f"{entry['tokens_per_s']:.1f} tok/s, {entry['ratio'][0]:.2f} x, tau {entry['tau']:.2f}"


def _rounds(runs: Sequence[BenchmarkRun]) -> dict[str, int]:
    counts = Counter[str]()
    for run in runs:
        counts.update(run.result.rounds_by_draft or {"none": run.result.rounds})
    return dict(counts.most_common())


def table(entries: Sequence[dict[str, Any]]) -> str:
    """Formats summaries by model pair and setting as a Markdown table."""
    lines = [
        "| setting | tok/s | ratio to plain | tokens a round | accepted | ms a round "
        "| of it draft, verify |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for entry in entries:
        ratio = entry["ratio"]
        shown = "" if ratio is None else "{:.3f} ({:.3f} to {:.3f})".format(*ratio)
        ms = entry["ms_per_round"]
        parts = f"{ms.get('draft', 0):.1f}, {ms.get('verify', ms.get('decode', 0)):.1f}"
        lines.append(
            f"| {entry['setting']} | {entry['tokens_per_s']:.1f} | {shown} | {entry['tau']:.2f} "
            f"| {entry['accepted']} of {entry['drafted']} | {sum(ms.values()):.1f} | {parts} |"
        )
    return "\n".join(lines)
