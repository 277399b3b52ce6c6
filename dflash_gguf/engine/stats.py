"""Statistics of one request: rounds, candidates, and seconds by phase."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from ..speculative.tree import Tree

PHASES = ("decode", "choose", "draft", "select", "verify", "commit", "sample", "overhead")
"""Phases of a round, beside "prefill". All requests of a batch count its whole time."""
PLAIN_PHASES = ("prefill", "decode", "sample", "overhead")


class Phase:
    """A clock around a with block. A round has ten, and a generator would take longer than some."""

    __slots__ = ("_name", "_seconds", "_started")

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        """seconds: by phase, to which the time of the block is added."""
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        took = time.perf_counter() - self._started
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + took


class RequestStats:
    """Counts and clocks of one request."""

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
        self._phase_s = dict.fromkeys(("prefill", *PHASES), 0.0)

    @property
    def accept_histogram(self) -> tuple[int, ...] | None:
        """At index i the rounds that accepted i candidates; None for plain decoding."""
        return None if self._accepted is None else tuple(self._accepted)

    @property
    def seconds_by_phase(self) -> dict[str, float]:
        """Seconds by phase. Without drafts, those of their phases are overhead."""
        if self._accepted is not None:
            return dict(self._phase_s)
        phases = {name: self._phase_s[name] for name in PLAIN_PHASES}
        phases["overhead"] += sum(s for name, s in self._phase_s.items() if name not in phases)
        return phases

    def credit(self, name: str, n_drafted: int, n_accepted: int) -> None:
        """Counts candidates of a proposer that were verified, and those that were accepted."""
        before = self.by_proposer.get(name, (0, 0))
        self.by_proposer[name] = before[0] + n_drafted, before[1] + n_accepted

    def set_prefill(self, seconds: float, sample_s: float) -> None:
        """Sets the time since the prefill began; sample_s: sampling in its last batch."""
        self.prefill_s = seconds
        self._phase_s["sample"] += sample_s
        self._phase_s["prefill"] = seconds - self._phase_s["sample"]

    def add_round(
        self, seconds: Mapping[str, float], tree: Tree | None, n_tokens: int, n_accepted: int
    ) -> None:
        """Counts a round, which other requests may have taken part in.

        seconds: by phase. tree: the verified tree. n_tokens, n_accepted: tokens that were added to
        the answer, and accepted candidates.
        """
        for name, s in seconds.items():
            self._phase_s["decode" if tree is None and name == "verify" else name] += s
        self.decode_s += sum(seconds.values())
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
