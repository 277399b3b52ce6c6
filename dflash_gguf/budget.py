"""How many candidates a round drafts: what a round costs and what it gives, learned while running.

A round that drafts n candidates takes draft(n) + verify(n + 1 rows) seconds and gives
1 + p1 + p1 p2 + ... + p1 .. pn tokens, pd being the chance that the candidate at depth d is the
target's choice once those before it were. The length with the most tokens per second wins; length
0 is plain decoding, a pass of one row. Nothing here reads a clock: equal rounds give equal choices.

The idea of letting the measured cost of the next node decide: CaDDTree, arXiv 2606.01813.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

PROBE_SHARE = 0.01
"""Part of the running time that may be lost on looking whether drafting pays by now."""
PROBE_AHEAD = 128
"""Plain rounds whose share may be spent at once: on the first look, or after long without one."""
MEMORY = 64
"""Rounds after which an observed acceptance weighs 1/e."""
PRIOR_CHANCE, PRIOR_WEIGHT = 0.5, 2.0
"""The chance at depth 1 before anything is seen, and how many observations it is worth. A deeper
depth starts from the chance of the one before it."""
N_TIMES = 9
"""Times that a moving median looks back."""
CELLS = 256
"""Cells of the first cost bucket; each further one is twice as wide."""
LADDER = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)
"""Lengths that are tried. Their verify has 2, 3, 4, 6, 8, 12, 16 ... rows: kernels change at
multiples of 4 and 8 rows, and every further length would need graphs and measurements."""


@dataclass(slots=True)
class Round:
    """What a round did and took.

    position: tokens in the caches before it. n_tokens: tokens it added to the answer.
    Seconds: draft_s; pass_s, the target's pass with what surrounds it; sample_s.
    """

    position: int
    n_drafted: int = 0
    n_accepted: int = 0
    n_tokens: int = 0
    draft_s: float = 0.0
    pass_s: float = 0.0
    sample_s: float = 0.0

    @property
    def n_decided(self) -> int:
        """Candidates that the target accepted or refused; the answer may end before the rest."""
        return min(self.n_tokens, self.n_drafted)

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.draft_s + self.pass_s + self.sample_s


class Lengths(Protocol):
    """Chooses how many candidates to draft."""

    def choose(self, position: int, limit: int) -> int:
        """Candidates for the next round, 0 to `limit`; 0 is a plain round."""

    def observe(self, done: Round) -> None:
        """Learns from a round."""


class FixedLength:
    """The same length every round, shorter only where the answer or the context ends."""

    def __init__(self, length: int, least: int = 0) -> None:
        self._length, self._least = length, least

    def choose(self, position: int, limit: int) -> int:  # noqa: ARG002
        """`length`, or what is left, if that is at least `least`."""
        length = min(self._length, limit)
        return length if length >= self._least else 0

    def observe(self, done: Round) -> None:
        """Learns nothing."""


class Budget:
    """What was learned about one pair on one device. It outlives answers."""

    def __init__(self) -> None:
        self.costs = Costs()
        self.acceptance = Acceptance()
        self._lost_s = 0.0
        self._since_plain = 0

    def choose(self, position: int, lengths: Sequence[int]) -> int:
        """The most profitable of `lengths` or 0; now and then one that only might be.

        position: tokens in the caches. lengths: ascending.
        """
        if not lengths or not self.costs.knows_plain:
            return 0
        gains = self.acceptance.tokens(lengths[-1])
        plain_s = self.costs.seconds(position, 0, 1.0)
        # A step of the ladder at a time: costs far beyond what was measured are guesses.
        longest = max(self.costs.lengths, default=0)
        n_open = sum(length <= longest for length in lengths) + 1
        costs = {n: self.costs.seconds(position, n, gains[n]) for n in lengths[:n_open]}
        best = max(costs, key=lambda n: gains[n] / max(costs[n], 1e-9))
        gain = gains[best] * plain_s / max(costs[best], 1e-9) - 1.0
        if gain > 0.0:
            # A plain round gives up the gain, but what drafting is compared with must not grow old.
            return 0 if self._since_plain * PROBE_SHARE >= gain else best
        probe = lengths[0]
        loss = costs[probe] - gains[probe] * plain_s
        return probe if self._lost_s + loss <= PROBE_SHARE * PROBE_AHEAD * plain_s else 0

    def observe(self, done: Round) -> None:
        """Learns from a round."""
        self._lost_s -= PROBE_SHARE * done.seconds
        if done.n_drafted:
            self._since_plain += 1
            self._lost_s += self._loss(done)
            self.acceptance.observe(done.n_accepted, done.n_decided)
        else:
            self._since_plain = 0
        self._lost_s = max(self._lost_s, 0.0)
        self.costs.observe(done)

    def _loss(self, done: Round) -> float:
        """Seconds that plain decoding would have saved; what a first run costs extra is no loss."""
        if not self.costs.knows_plain:
            return 0.0
        expected_s = self.costs.seconds(done.position, done.n_drafted, done.n_tokens)
        is_warm = self.costs.is_warm(done.n_drafted)
        seconds = done.seconds if is_warm else min(done.seconds, expected_s)
        return seconds - done.n_tokens * self.costs.seconds(done.position, 0, 1.0)


class BudgetedLength:
    """A budget's choice among the lengths that one answer allows."""

    def __init__(self, budget: Budget, longest: int, least: int = 0) -> None:
        self._budget = budget
        steps = {n for n in (*LADDER, longest, least) if max(least, 1) <= n <= longest}
        self._lengths = sorted(steps)

    def choose(self, position: int, limit: int) -> int:
        """The most profitable length."""
        return self._budget.choose(position, [n for n in self._lengths if n <= limit])

    def observe(self, done: Round) -> None:
        """Passes the round on."""
        self._budget.observe(done)


class Acceptance:
    """Chance that a candidate is accepted, by depth; old rounds fade."""

    def __init__(self) -> None:
        self._accepted: list[float] = []
        self._tried: list[float] = []

    def observe(self, n_accepted: int, n_tried: int) -> None:
        """Counts a round's candidates: the first n_tried were decided on."""
        keep = 1.0 - 1.0 / MEMORY
        n_new = n_tried - len(self._tried)
        self._accepted += [0.0] * n_new
        self._tried += [0.0] * n_new
        for depth in range(len(self._tried)):
            self._accepted[depth] = keep * self._accepted[depth] + (depth < n_accepted)
            self._tried[depth] = keep * self._tried[depth] + (depth < n_tried)

    def chances(self, n: int) -> list[float]:
        """The chance at depths 1 to n, given that those before were accepted."""
        found: list[float] = []
        chance = PRIOR_CHANCE
        for depth in range(n):
            seen = depth < len(self._tried)
            accepted, tried = (self._accepted[depth], self._tried[depth]) if seen else (0.0, 0.0)
            chance = (accepted + PRIOR_WEIGHT * chance) / (tried + PRIOR_WEIGHT)
            found.append(chance)
        return found

    def tokens(self, n: int) -> list[float]:
        """Expected tokens of rounds that draft 0 to n candidates."""
        expected, path = [1.0], 1.0
        for chance in self.chances(n):
            path *= chance
            expected.append(expected[-1] + path)
        return expected


class Costs:
    """Seconds of a round by what it runs: moving medians of drafts, passes and choices."""

    def __init__(self) -> None:
        self._drafts: dict[int, Median] = {}
        self._passes: dict[int, dict[int, Median]] = {}
        self._sample = Median()

    @property
    def knows_plain(self) -> bool:
        """Whether a plain round was measured."""
        return 1 in self._passes

    @property
    def lengths(self) -> set[int]:
        """Draft lengths that were run."""
        return set(self._drafts)

    def is_warm(self, n_drafted: int) -> bool:
        """Whether rounds of this length have been through their first run."""
        buckets = self._passes.get(n_drafted + 1, {})
        return any(median.is_warm for median in buckets.values())

    def observe(self, done: Round) -> None:
        """Files a round's times."""
        rows = self._passes.setdefault(done.n_drafted + 1, {})
        rows.setdefault(_bucket(done.position), Median()).add(done.pass_s)
        if done.n_drafted:
            self._drafts.setdefault(done.n_drafted, Median()).add(done.draft_s)
        self._sample.add(done.sample_s / done.n_tokens)

    def seconds(self, position: int, n_drafted: int, n_tokens: float) -> float:
        """Expected seconds of a round; a plain one must have been measured."""
        bucket = _bucket(position)
        passes = {rows: _nearest(buckets, bucket) for rows, buckets in self._passes.items()}
        total = _between(passes, n_drafted + 1) + n_tokens * self._sample.value
        return total + _between(self._drafts, n_drafted) if n_drafted else total


class Median:
    """Median of the last times. The first one does not count once there are others.

    The first run of a shape builds its graph and warms its kernels.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=N_TIMES)
        self._is_warm = False
        self.value = 0.0

    @property
    def is_warm(self) -> bool:
        """Whether there is more than the first time."""
        return self._is_warm

    def add(self, seconds: float) -> None:
        """Adds a time."""
        if self._times and not self._is_warm:
            self._is_warm = True
            self._times.clear()
        self._times.append(seconds)
        self.value = statistics.median(self._times)


def _bucket(position: int) -> int:
    return (position // CELLS).bit_length()


def _nearest(buckets: dict[int, Median], bucket: int) -> Median:
    """The median of the bucket, or of the nearest; warm ones first."""
    return min(buckets.items(), key=lambda item: (not item[1].is_warm, abs(item[0] - bucket)))[1]


def _between(known: dict[int, Median], x: int) -> float:
    """The cost at x, on straight lines between what is known and beyond; never falling beyond.

    A first time stands for its own x only where nothing else is known.
    """
    if x in known and known[x].is_warm:
        return known[x].value
    points = sorted((at, median.value) for at, median in known.items() if at != x)
    if not points:
        return known[x].value if x in known else 0.0
    if len(points) == 1:
        return points[0][1]
    above = next((i for i, (at, _) in enumerate(points) if at > x), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(above - 1, 0)], points[max(above, 1)]
    value = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return max(value, y1) if x > x1 else max(value, 0.0)
