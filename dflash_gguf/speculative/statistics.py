"""What is learned from times that were measured: moving medians, lines between them, experts.

A mixture of experts reads the weights of those that the rows of a pass touch: few where rows are
alike, many where they differ. So a time is kept with the number of experts it was measured with,
and told for as many as rows of the text at hand are likely to touch.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import deque
from collections.abc import Iterable

from .._validate import number

N_TIMES = 9
"""Times of a moving median."""
N_FEW = 3
"""Times of which the least counts, not yet the median."""
N_KEPT = 3
"""Times that a stored median counts as when it is loaded again."""


class RunningMedian:
    """Median of the last times. The first ones do not count once there are others.

    The first run of a shape builds its graph and warms its kernels; where graphs are captured, the
    second does that.
    """

    def __init__(self, n_first: int = 1) -> None:
        """n_first: runs that are slower than those to come."""
        self._n_first = n_first
        self._times: deque[tuple[float, float]] = deque(maxlen=N_TIMES)
        self.is_warm = False
        """Whether there is more than the first times."""
        self.value = self.n_experts = 0.0
        """Seconds, and the experts that a pass which took so long has touched."""

    @classmethod
    def known(cls, seconds: float, n_experts: float = 0.0, least: float = 0.0) -> RunningMedian:
        """One that was measured in another process; new times soon outweigh it.

        Errors: ValueError for less than `least`, or for more than a time can be.
        """
        median = cls()
        median.value = number("a time", seconds, least, 1e6)
        median.n_experts = number("a number of experts", n_experts, 0.0, 1e9)
        median._times.extend([(median.value, median.n_experts)] * N_KEPT)
        median.is_warm = True
        return median

    @property
    def is_measured(self) -> bool:
        """Whether it is warm, by times of answers."""
        return self.is_warm and bool(self._times)

    @property
    def is_sure(self) -> bool:
        """Whether a single time does not change it by much."""
        return self.is_warm and len(self._times) >= N_FEW

    @property
    def is_full(self) -> bool:
        """Whether a further time replaces one."""
        return len(self._times) == N_TIMES

    def mark_stale(self) -> None:
        """The next time takes the place of those before, which were not of answers."""
        self._times.clear()

    def add(self, seconds: float, n_experts: float = 0.0) -> None:
        """Adds a time."""
        if len(self._times) == self._n_first and not self.is_warm:
            self.is_warm = True
            self._times.clear()
        self._times.append((seconds, n_experts))
        # Noise only adds; what seems slow by a single outlier would never be tried again.
        times = sorted(self._times)
        at = len(times) // 2
        low, high = times[at - 1 + len(times) % 2], times[at]
        if len(times) < N_FEW:
            low = high = times[0]
        self.value, self.n_experts = (low[0] + high[0]) / 2.0, (low[1] + high[1]) / 2.0


class ExpertCosts:
    """Of a mixture: how many of them n rows touch, and what each costs.

    k times the experts of one row where nothing is shared is n times; the rows of a text share
    some, more where they are alike: n ** growth times. The growth falls a little with the rows, as
    the layers' experts are used up.
    """

    MEMORY, COST_MEMORY = 8, 100
    """Passes after which a growth, and a cost, weighs 1/e in what is known."""
    BEND = 0.07
    """Of the growth, that doubled rows take from it: measured on shapes of 32 and 128 experts."""

    def __init__(self) -> None:
        self._of_row = self._growth = 0.0
        self._n_seen = 0
        self._products = self._squares = 0.0

    @property
    def cost_s(self) -> float:
        """Seconds of one expert; what is known of it counts from some differences on."""
        return max(self._products, 0.0) / max(self._squares + self._of_row**2, 1.0)

    @property
    def has_experts(self) -> bool:
        """Whether a row touches any."""
        return self._of_row > 0.0

    @property
    def has_costs(self) -> bool:
        """Whether passes of as many rows and other numbers of experts were compared."""
        return self._squares > 0.0

    def expected(self, n_rows: int) -> float:
        """What so many rows are likely to touch."""
        return float(self._of_row * n_rows ** (self._growth * self._bend(n_rows)))

    def more_s(self, median: RunningMedian, n_rows: int) -> float:
        """What a pass is likely to take beyond a time that was measured."""
        if median.n_experts == 0.0 or not self.has_experts:
            return 0.0
        return self.cost_s * (self.expected(n_rows) - median.n_experts)

    def mark_stale(self) -> None:
        """What rows touch was seen of no text so far."""
        self._n_seen = min(self._n_seen, 1)

    def observe(self, n_rows: int, n_experts: int, seconds: float, median: RunningMedian) -> None:
        """Learns from a pass. median: what is known of others of as many rows."""
        if n_rows == 1:
            self._of_row = float(n_experts)
        elif 0.0 < self._of_row <= n_experts:
            growth = math.log(n_experts / self._of_row, n_rows) / self._bend(n_rows)
            self._n_seen = min(self._n_seen + 1, self.MEMORY)
            self._growth += (growth - self._growth) / self._n_seen
        if median.is_measured and min(median.n_experts, median.value) > 0.0:
            more = n_experts - median.n_experts
            more_s = min(max(seconds / median.value - 1.0, -0.5), 0.5) * median.value
            keep = 1.0 - 1.0 / self.COST_MEMORY
            self._products = keep * self._products + more * more_s
            self._squares = keep * self._squares + more * more

    def _bend(self, n_rows: int) -> float:
        return 1.0 - self.BEND * math.log2(max(n_rows, 2) / 2.0)

    def to_list(self) -> list[float]:
        """What was learned."""
        return [self._of_row, self._growth, max(self._products, 0.0), self._squares]

    @classmethod
    def from_list(cls, stored: Iterable[float]) -> ExpertCosts:
        """What `to_list` gave; ValueError or TypeError for anything else."""
        experts = cls()
        of_row, growth, products, squares = stored
        experts._of_row = number("a number of experts", of_row, 0.0, 1e9)
        experts._growth = number("a growth", growth, 0.0, 2.0)
        experts._products = number("a sum", products, 0.0, 1e18)
        experts._squares = number("a sum", squares, 0.0, 1e18)
        experts._n_seen = 1
        return experts


class Interpolator:
    """Costs on straight lines between what is known, beyond as they rose so far.

    Beyond, the last step alone would mislead: it may be where a kernel ends.
    """

    def __init__(self, points: Iterable[tuple[int, float, bool]]) -> None:
        """points: x, seconds, and whether that is more than a first time.

        First times stand for something only where nothing else is known.
        """
        found = sorted(points)
        found = [point for point in found if point[2]] or found
        self._xs = [x for x, _, _ in found]
        self._ys = [y for _, y, _ in found]
        self._found: dict[int, float] = {}

    def nearest(self, x: int) -> int:
        """The known place that is nearest, the lower one on ties."""
        return min(self._xs, key=lambda known: abs(known - x))

    def at(self, x: int) -> float:
        """The cost at x; 0 where nothing is known."""
        if x not in self._found:
            self._found[x] = self._at(x)
        return self._found[x]

    def _at(self, x: int) -> float:
        xs, ys = self._xs, self._ys
        if len(xs) < 2:
            return ys[0] if ys else 0.0
        if x >= xs[-1]:
            return max(ys[-1] + (ys[-1] - ys[0]) / (xs[-1] - xs[0]) * (x - xs[-1]), ys[-1])
        i = max(bisect(xs, x), 1)
        slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
        return max(ys[i] + slope * (x - xs[i]), 0.0)
