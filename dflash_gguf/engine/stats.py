"""Statistics of one request: rounds, candidates, and seconds by phase."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from ..speculative.tree import Tree

PHASES = (
    *("decode", "choose", "draft", "select", "mask", "verify", "commit", "sample"),
    "overhead",
)
"""Phases of a round besides prefill. Each request of a batch counts the batch's whole time."""
PLAIN_PHASES = ("prefill", "decode", "mask", "sample", "overhead")


class Phase:
    """A timer of one phase, used ten times a round; a generator-based timer would be too slow."""

    __slots__ = ("_name", "_seconds", "_started")

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        """Creates a timer that adds the duration of a with block to seconds[name]."""
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        took = time.perf_counter() - self._started
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + took


class RequestStats:
    """Counters and times of one request."""

    def __init__(self, is_drafted: bool) -> None:
        self.prefill_s = 0.0
        self.decode_s = 0.0
        self.rounds = 0
        self.n_passes = 0.0
        self.n_decoded = 0
        self.n_drafted = 0
        self.rounds_by_draft: Counter[str] = Counter()
        self.by_proposer: dict[str, tuple[int, int]] = {}
        self._accepted: list[int] | None = [] if is_drafted else None
        self._phase_s = dict.fromkeys(("prefill", *PHASES), 0.0)

    @property
    def accept_histogram(self) -> tuple[int, ...] | None:
        """Number of rounds by number of accepted candidates; None for plain decoding."""
        return None if self._accepted is None else tuple(self._accepted)

    @property
    def seconds_by_phase(self) -> dict[str, float]:
        """Seconds by phase; without drafts, the drafting phases are added to the overhead."""
        if self._accepted is not None:
            return dict(self._phase_s)
        phases = {name: self._phase_s[name] for name in PLAIN_PHASES}
        phases["overhead"] += sum(s for name, s in self._phase_s.items() if name not in phases)
        return phases

    def credit(self, name: str, n_drafted: int, n_accepted: int) -> None:
        """Adds verified and accepted candidates to the counts of a proposer."""
        before = self.by_proposer.get(name, (0, 0))
        self.by_proposer[name] = before[0] + n_drafted, before[1] + n_accepted

    def set_prefill(self, seconds: float, sample_s: float) -> None:
        """Sets the seconds of prefill so far; sample_s: seconds of sampling in the newest batch."""
        self.prefill_s = seconds
        self._phase_s["sample"] += sample_s
        self._phase_s["prefill"] = seconds - self._phase_s["sample"]

    def add_round(
        self,
        seconds: Mapping[str, float],
        n_sharing: int,
        tree: Tree | None,
        n_tokens: int,
        n_accepted: int,
    ) -> None:
        """Counts a decoding round.

        seconds: duration of the round by phase. n_sharing: requests that decoded in its pass.
        tree: the verified tree, None for a plain step. n_tokens: tokens added to the answer.
        n_accepted: accepted candidates.
        """
        for name, s in seconds.items():
            self._phase_s["decode" if tree is None and name == "verify" else name] += s
        self.decode_s += sum(seconds.values())
        self.rounds += 1
        self.n_passes += 1 / n_sharing
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
