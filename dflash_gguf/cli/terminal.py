"""Output beside the answer: progress bars, reasoning, and lines of figures."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from ..outputs import Result
from ..text.tools.values import parsed

BAR_CELLS = 30
REDRAW_S = 0.1
DELAY_S = 0.3
"""Seconds before a progress bar appears."""
MIN_TOKENS = 32
"""Fewest tokens of an answer whose speed is compared without a remark."""
MAX_SPREAD = 1.4
"""Highest speed ratio of a comparison over its lowest, above which the ratios are too uneven."""


class Bar:
    """A progress bar on stderr, shown only in a terminal; a progress callback of (done, total)."""

    def __init__(self, what: str, unit: str | None = None) -> None:
        """unit: unit of the progress ("tokens"), to show a rate per second; None for no rate."""
        self._what = what
        self._unit = unit
        self._started = time.monotonic()
        self._stream = sys.stderr
        self._is_terminal = self._stream.isatty()
        self._drawn = self._started + DELAY_S - REDRAW_S
        self._is_visible = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._is_terminal or total <= 0 or now - self._drawn < REDRAW_S:
            return
        self._drawn, self._is_visible = now, True
        cells = BAR_CELLS * done // total
        bar = "#" * cells + "." * (BAR_CELLS - cells)
        rate = ""
        if self._unit is not None:
            rate = f", {done / (now - self._started):.0f} {self._unit}/s"
        self._stream.write(f"\r{self._what} [{bar}] {100 * done // total:3d} %{rate}  ")
        self._stream.flush()

    def clear(self) -> None:
        """Erases the progress bar."""
        if self._is_visible:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._is_visible = False


class Thoughts:
    """Prints reasoning on stderr, dim in a terminal, so that stdout has the answer alone."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        self._is_dim = self._stream.isatty()
        self._is_open = False

    def show(self, text: str, *, is_over: bool) -> None:
        """Prints more reasoning. is_over: True once the answer has begun."""
        if text and not self._is_open:
            self._is_open = True
            self._stream.write("\x1b[2m" if self._is_dim else "")
        self._stream.write(text)
        self._stream.flush()
        if is_over:
            self.close()

    def close(self) -> None:
        """Ends the reasoning with a blank line, if there was any."""
        if self._is_open:
            self._is_open = False
            self._stream.write("\x1b[0m\n\n" if self._is_dim else "\n\n")
            self._stream.flush()


def brief_figures(result: Result) -> str:
    """Returns a line of the speed of an answer, for chats."""
    return f"({result.n_tokens} tokens{_rate(result.tokens_per_s)}, {_prompt(result)})"


def figures(result: Result) -> str:
    """Returns a line of counts, speeds and times of an answer."""
    parts = [
        f"{_prompt(result)}{_rate(result.prefill_tokens_per_s)}",
        f"answer {result.n_tokens} tokens{_rate(result.tokens_per_s)}",
    ]
    if result.tau is not None:
        parts.append(f"{result.tau:.2f} tokens a round, {_drafted(result)}")
        parts.append(f"rounds: {_kinds(result.rounds_by_draft or {})}")
        phases = ((name, 1e3 * s / result.rounds) for name, s in result.seconds_by_phase.items())
        shown = ", ".join(f"{name} {ms:.1f}" for name, ms in phases if name != "prefill")
        parts.append(f"ms a round: {shown}")
    parts += [f"ended by {result.stop_reason}", f"seed {result.seed}"]
    parts.append(f"{result.backend}, {result.threads} threads")
    return " | ".join(parts)


def comparison(pairs: Sequence[tuple[Result, Result]]) -> str:
    """Returns a line that compares answers with drafts to the same answers without.

    pairs: (drafted, plain). The extremes of 6 pairs' ratios enclose the true median with 97 %.
    """
    drafted, plain = pairs[0]
    tokens = zip(drafted.tokens, plain.tokens, strict=False)
    n_same = next((i for i, (a, b) in enumerate(tokens) if a != b), None)
    rates = [(a.tokens_per_s or 0.0, b.tokens_per_s or 0.0) for a, b in pairs]
    parts = []
    if all(map(all, rates)):
        ratios = sorted(a / b for a, b in rates)
        fast, slow = map(statistics.median, zip(*rates, strict=True))
        parts += [f"again{_rate(fast)}", f"plainly{_rate(slow)}"]
        parts.append(f"{statistics.median(ratios):.2f} times as fast")
        parts[-1] += f" ({ratios[0]:.2f} to {ratios[-1]:.2f} in {len(ratios)} pairs)"
        if drafted.n_tokens < MIN_TOKENS:
            parts[-1] += ", too short an answer to tell"
        elif ratios[-1] > MAX_SPREAD * ratios[0]:
            parts[-1] += ", too uneven to tell: is the machine busy?"
    if drafted.tau is not None:
        parts.append(f"{drafted.tau:.2f} tokens a round")
    parts.append("the same tokens" if n_same is None else f"other tokens from number {n_same + 1}")
    return " | ".join(parts)


def _prompt(result: Result) -> str:
    cached = f", {result.n_cached} of them cached" if result.n_cached else ""
    return f"prompt {result.n_prompt} tokens{cached}"


def _rate(rate: float | None) -> str:
    return "" if rate is None else f" at {rate:.1f}/s"


def _drafted(result: Result) -> str:
    """Formats candidates like "90 drafted (dflash 31 of 80, suffix 9 of 10 accepted)"."""
    shares = [
        f"{name} {taken} of {n}" for name, (n, taken) in result.candidates_by_proposer.items()
    ]
    more = f" ({', '.join(shares)} accepted)" if shares else ""
    return f"{result.n_drafted} drafted{more}"


def _kinds(rounds_by_draft: Mapping[str, int]) -> str:
    """Formats rounds by kind, with their mean candidates, like "9 chain of 3.2, 40 none"."""
    rounds, nodes = Counter[str](), Counter[str]()
    for name, n in rounds_by_draft.items():
        kind, _, size = name.partition(" ")
        rounds[kind] += n
        nodes[kind] += n * int(size or 0)
    return ", ".join(
        f"{n} {kind}" + (f" of {nodes[kind] / n:.1f}" if nodes[kind] else "")
        for kind, n in sorted(rounds.items())
    )


def call_lines(result: Result) -> list[str]:
    """Returns a JSON line for each tool call: name, and arguments (a string if no valid JSON)."""
    lines = []
    for call in result.tool_calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        value = parsed(arguments)
        given = arguments if value is ... else value
        lines.append(json.dumps({"name": name, "arguments": given}, ensure_ascii=False) + "\n")
    return lines
