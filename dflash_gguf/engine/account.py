"""What an answer took so far: rounds, candidates, and seconds by phase."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from ..speculative.tree import Tree

PASS_PHASES = ("decode", "choose", "draft", "select", "verify", "commit")
"""What a round takes for all answers in it; each samples for itself."""


class Phase:
    """A clock around a with block. A round has ten, and a generator would take longer than some."""

    __slots__ = ("_name", "_seconds", "_started")

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        """seconds: by phase, what this one is added to."""
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        took = time.perf_counter() - self._started
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + took


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
        self._phase_s = dict.fromkeys(("prefill", *PASS_PHASES, "sample", "overhead"), 0.0)

    @property
    def accept_histogram(self) -> tuple[int, ...] | None:
        """At index i the rounds that accepted i candidates; None for plain decoding."""
        return None if self._accepted is None else tuple(self._accepted)

    @property
    def seconds_by_phase(self) -> dict[str, float]:
        """Seconds by phase. Without drafts, those of their phases are overhead."""
        if self._accepted is not None:
            return dict(self._phase_s)
        phases = {name: self._phase_s[name] for name in ("prefill", "decode", "sample", "overhead")}
        phases["overhead"] += sum(s for name, s in self._phase_s.items() if name not in phases)
        return phases

    def credit(self, name: str, n_drafted: int, n_accepted: int) -> None:
        """Counts candidates of a proposer that were verified, and those that were accepted."""
        before = self.by_proposer.get(name, (0, 0))
        self.by_proposer[name] = before[0] + n_drafted, before[1] + n_accepted

    def phase(self, name: str) -> Phase:
        """Adds the time of a with block to a phase."""
        return Phase(self._phase_s, name)

    @property
    def sample_s(self) -> float:
        """Seconds of sampling so far."""
        return self._phase_s["sample"]

    def sampled(self, seconds: float) -> None:
        """Adds to what sampling took."""
        self._phase_s["sample"] += seconds

    def set_prefill(self, seconds: float) -> None:
        """What it took from the answer's begin until its first token, as far as it has come."""
        self.prefill_s = seconds
        self._phase_s["prefill"] = seconds - self.sample_s

    def add_round(
        self,
        seconds: float,
        took: Mapping[str, float],
        overhead_s: float,
        tree: Tree | None,
        n_tokens: int,
        n_accepted: int,
    ) -> None:
        """Counts a round, which other answers may have taken part in.

        took: seconds by phase, without sampling, which was counted already. overhead_s: in none.
        tree: what was verified. n_tokens, n_accepted: what came of it.
        """
        phase_s = self._phase_s
        for name, s in took.items():
            phase_s["decode" if tree is None and name == "verify" else name] += s
        phase_s["overhead"] += overhead_s
        self.decode_s += seconds
        self.rounds += 1
        self.n_decoded += n_tokens
        if tree is None:
            self.rounds_by_draft["none"] += 1
        else:
            self.n_drafted += tree.n_drafted
            kind = "chain" if tree.is_chain else "tree"
            self.rounds_by_draft[f"{kind} {tree.n_drafted}"] += 1
        if self._accepted is not None:
            while len(self._accepted) <= n_accepted:
                self._accepted.append(0)
            self._accepted[n_accepted] += 1
