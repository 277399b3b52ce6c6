"""What an answer took so far: rounds, candidates, and seconds by phase."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from .policy.costs import Round

ROUND_PHASES = ("decode", "choose", "draft", "tree", "verify", "commit", "sample")


def set_seconds(done: Round, seconds: float, took: Mapping[str, float]) -> None:
    """Fills in what a round took. took: seconds by phase."""
    done.choose_s, done.sample_s = took["choose"], took["sample"]
    done.draft_s = took["draft"] + took["tree"]
    done.pass_s = seconds - done.choose_s - done.draft_s - done.sample_s


class Phase:
    """A clock around a with block. A round has ten, and a generator would take longer than some."""

    __slots__ = ("_name", "_seconds", "_started")

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        """seconds: by phase, what this one is added to."""
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._name] += time.perf_counter() - self._started


class Account:
    """Counts and clocks of one answer."""

    def __init__(self, is_drafted: bool) -> None:
        """is_drafted: whether rounds may have candidates."""
        self.prefill_s = 0.0
        self.decode_s = 0.0
        self.rounds = 0
        self.n_decoded = 0
        self.n_drafted = 0
        self.rounds_by_draft: Counter[str] = Counter()
        self.by_proposer: dict[str, tuple[int, int]] = {}
        self._accepted: list[int] | None = [] if is_drafted else None
        self._phase_s = dict.fromkeys(("prefill", *ROUND_PHASES, "host"), 0.0)

    @property
    def accept_histogram(self) -> tuple[int, ...] | None:
        """At index i the rounds that accepted i candidates; None for plain decoding."""
        return None if self._accepted is None else tuple(self._accepted)

    @property
    def phase_s(self) -> dict[str, float]:
        """Seconds by phase, drafting only where there is any."""
        idle = () if self._accepted is not None else ("choose", "draft", "tree", "verify", "commit")
        return {name: s for name, s in self._phase_s.items() if name not in idle}

    def credit(self, name: str, n_drafted: int, n_accepted: int) -> None:
        """Counts candidates of a proposer that were verified, and those that were accepted."""
        before = self.by_proposer.get(name, (0, 0))
        self.by_proposer[name] = before[0] + n_drafted, before[1] + n_accepted

    def phase(self, name: str) -> Phase:
        """Adds the time of a with block to a phase."""
        return Phase(self._phase_s, name)

    @contextmanager
    def round(self, position: int) -> Iterator[Round]:
        """Counts the round that the with block runs and whose counts it fills in.

        What no phase took is the host's.
        """
        done = Round(position)
        before = dict(self._phase_s)
        started = time.perf_counter()
        try:
            yield done
        finally:
            seconds = time.perf_counter() - started
            took = {name: self._phase_s[name] - before[name] for name in ROUND_PHASES}
            self.decode_s += seconds
            self._phase_s["host"] += seconds - sum(took.values())
        set_seconds(done, seconds, took)
        self._count(done)

    def add_round(self, done: Round, seconds: float, took: Mapping[str, float]) -> None:
        """Counts a round that several answers took part in. took: its phases, but for sampling."""
        self.decode_s += seconds
        for name, s in took.items():
            self._phase_s[name] += s
        self._phase_s["host"] += seconds - sum(took.values())
        self._count(done)

    def _count(self, done: Round) -> None:
        self.rounds += 1
        self.n_decoded += done.n_tokens
        self.n_drafted += done.n_drafted
        self.rounds_by_draft[f"{done.kind} {done.n_drafted}" if done.n_drafted else "none"] += 1
        if self._accepted is not None:
            self._accepted += [0] * (done.n_accepted + 1 - len(self._accepted))
            self._accepted[done.n_accepted] += 1
