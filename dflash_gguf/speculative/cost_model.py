"""Measured seconds of rounds, by rows, sequences and tokens in the caches.

A time is the median of the last measurements. Other sizes are interpolated between measured ones,
and more rows never take less.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._validate import integer, number
from .tree import Tree

N_TIMES = 9
"""Times in a running median. With fewer than a third of them, the minimum counts: noise adds."""
N_FIRST = 2
"""First runs of a shape, whose times are dropped: the graph is built, and on CUDA captured."""
ROW = 0.25
"""Assumed cost, in plain passes, of a draft and of each further row, until one is measured."""
CELLS = 256
"""Width of the first bucket of cached tokens; each further bucket is twice as wide."""
PASSES = ("plain", "chains")
"""Kinds of passes of the target; `_draft_kind` names those of drafts."""


@dataclass(slots=True)
class Round:
    """Work and times of a round: one pass for one sequence or several.

    position: tokens in the caches of all its sequences before it. n_sequences: decoding sequences;
    n_undrafted: those of them without speculation. is_timing_shared: True if the pass or the draft
    did other work too, so that the round's seconds are not filed.
    proposer: name of the proposer that ran a pass, if any; n_positions: its positions, of the
    longest draft; n_draft_rows: rows of its pass; is_top1: True for best candidates alone. free:
    names of proposers that had candidates without a pass.
    n_drafted: verified nodes below the roots; is_tree: True if they were more than chains.
    n_accepted: accepted nodes. n_tokens: tokens added to answers.
    Seconds: choose_s of deciding, and of learning from the last round with proposers; draft_s of
    proposing and selecting, pass_s of the target's pass and of batching, sample_s of sampling.
    """

    position: int
    n_sequences: int = 1
    n_undrafted: int = 0
    is_timing_shared: bool = False
    proposer: str = ""
    free: tuple[str, ...] = ()
    n_positions: int = 0
    n_draft_rows: int = 0
    is_top1: bool = False
    n_drafted: int = 0
    is_tree: bool = False
    n_accepted: int = 0
    n_tokens: int = 0
    choose_s: float = 0.0
    draft_s: float = 0.0
    pass_s: float = 0.0
    sample_s: float = 0.0

    def add_tree(self, tree: Tree) -> None:
        """Adds the nodes that the target verifies for one sequence."""
        self.n_drafted += tree.n_drafted
        self.is_tree |= not tree.is_chain

    @property
    def n_rows(self) -> int:
        """Rows of the pass."""
        return self.n_sequences + self.n_drafted

    @property
    def is_plain(self) -> bool:
        """True if no proposer ran a pass, and nothing was verified."""
        return not (self.n_drafted or self.n_positions)

    @property
    def n_asked(self) -> int:
        """Sequences with speculation."""
        return self.n_sequences - self.n_undrafted

    @property
    def seconds(self) -> float:
        """Seconds of the whole round."""
        return self.choose_s + self.draft_s + self.pass_s + self.sample_s


class RunningMedian:
    """Median of the last times, in seconds; 0 without any."""

    def __init__(self, *times: float) -> None:
        self._times: deque[float] = deque(maxlen=N_TIMES)
        self.value = 0.0
        for seconds in times:
            self.add(seconds)

    @property
    def is_sure(self) -> bool:
        """True if there are enough times for one outlier to move nothing."""
        return 3 * len(self._times) >= N_TIMES

    def add(self, seconds: float) -> None:
        """Adds a time."""
        self._times.append(seconds)
        times, n = sorted(self._times), len(self._times)
        self.value = (times[(n - 1) // 2] + times[n // 2]) / 2.0 if self.is_sure else times[0]


class Curve:
    """Seconds by rows: rising lines between measured points, extrapolated by their mean slope."""

    def __init__(self, points: Iterable[tuple[int, float]]) -> None:
        """points: rows and seconds; at least one."""
        found = sorted(points)
        self._xs = [n_rows for n_rows, _ in found]
        self._ys = list(accumulate((seconds for _, seconds in found), max))

    def at(self, n_rows: int) -> float:
        """Returns the seconds of so many rows."""
        xs, ys = self._xs, self._ys
        if len(xs) == 1:
            return ys[0] * max(1.0 + ROW * (n_rows - xs[0]), 0.0)
        if n_rows >= xs[-1]:  # the last step alone may be where a kernel ends
            return ys[-1] + (ys[-1] - ys[0]) / (xs[-1] - xs[0]) * (n_rows - xs[-1])
        i = max(bisect(xs, n_rows), 1)
        slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
        return max(ys[i] + slope * (n_rows - xs[i]), 0.0)


Buckets = dict[int, RunningMedian]
"""Times of one kind and number of rows, by tokens in the caches."""


class CostModel:
    """Times of plain passes, chains, trees and drafts.

    Rows of several sequences cost what as many of one do, and what plain passes of as many
    sequences were measured to cost more; all that times a factor, which is measured for each number
    of sequences, and for trees.
    """

    def __init__(self) -> None:
        self.n_observed = 0
        """Rounds filed by this process."""
        self.sample = RunningMedian()
        """Seconds of sampling one token."""
        self._times: defaultdict[str, dict[int, Buckets]] = defaultdict(dict)  # keys: kind, rows
        self._factors: dict[tuple[int, bool], RunningMedian] = {}  # keys: sequences, is_tree
        self._n_runs: Counter[tuple[object, ...]] = Counter()
        self._curves: dict[tuple[str, int], Curve] = {}

    def knows_plain(self, n_sequences: int = 1) -> bool:
        """Returns True if plain passes of as many sequences, or up to twice as many, are known."""
        return any(n in self._times["plain"] for n in range(n_sequences, 2 * n_sequences))

    def is_warm(self, done: Round) -> bool:
        """Returns True if a pass and a draft of the same shapes ran N_FIRST times before."""
        shapes = _shapes(done)
        return all(self._n_runs[shape] >= N_FIRST for shape in shapes if shape is not None)

    def observe(self, done: Round) -> None:
        """Files the times of a round."""
        self.n_observed += 1
        rows, draft = _shapes(done)
        if draft is not None and self._counts(draft):
            self._file(*draft, 0, done.draft_s)
        if self._counts(rows):
            bucket = _bucket(done.position)
            if len(rows) == 2:
                self._file(*rows, bucket, done.pass_s)
            else:
                chains_s = float(self._chains_s(bucket, (done.n_rows,), done.n_sequences)[0])
                factor = self._factors.setdefault(rows[:2], RunningMedian())
                factor.add(done.pass_s / max(chains_s, 1e-9))
        self.sample.add(done.sample_s / max(done.n_tokens, 1))

    def expected_s(self, done: Round) -> float:
        """Returns the seconds of such a round, if its pass does no other work."""
        draft_s = 0.0
        if done.n_positions:
            draft_s = self.draft_s(done.proposer, done.n_draft_rows, done.is_top1)
        pass_s = self.pass_s(done.position, done.n_rows, done.is_tree, done.n_sequences)
        return draft_s + pass_s + done.n_tokens * self.sample.value

    def draft_s(self, proposer: str, n_rows: int, is_top1: bool) -> float:
        """Returns the seconds of a draft; before the first one of its kind, those of the other."""
        for kind in (_draft_kind(proposer, is_top1), _draft_kind(proposer, not is_top1)):
            if self._times[kind]:
                return self._curve(kind, 0).at(n_rows)
        return ROW * self.plain_s(0)

    def plain_s(self, position: int, n_sequences: int = 1) -> float:
        """Returns the seconds of a plain round after `position` tokens."""
        pass_s = self._curve("plain", _bucket(position)).at(n_sequences)
        return pass_s + n_sequences * self.sample.value

    def passes_s(
        self, position: int, counts: Iterable[int], is_tree: bool = False, n_sequences: int = 1
    ) -> NDArray[np.float64]:
        """Returns the seconds of passes with so many rows after `position` tokens, [n]."""
        chains_s = self._chains_s(_bucket(position), counts, n_sequences)
        known = [key for key, factor in self._factors.items() if factor.is_sure]
        if not known or not (is_tree or n_sequences > 1):
            return chains_s
        # Trees by trees, chains by chains; then by the nearest number of sequences.
        key = min(known, key=lambda key: (key[1] != is_tree, abs(key[0] - n_sequences)))
        return chains_s * (self._factors[key].value if key[0] > 1 or is_tree else 1.0)

    def pass_s(
        self, position: int, n_rows: int, is_tree: bool = False, n_sequences: int = 1
    ) -> float:
        """Returns the seconds of one such pass."""
        return float(self.passes_s(position, (n_rows,), is_tree, n_sequences)[0])

    def _chains_s(
        self, bucket: int, counts: Iterable[int], n_sequences: int
    ) -> NDArray[np.float64]:
        chains, more_s = self._curve("chains", bucket), 0.0
        if n_sequences > 1:
            more_s = self._curve("plain", bucket).at(n_sequences) - chains.at(n_sequences)
        return np.array([max(chains.at(n) + more_s, 0.0) for n in counts])

    def _curve(self, kind: str, bucket: int) -> Curve:
        """Returns seconds by rows in a bucket; all are 0 if nothing is known.

        Rows without a time in the bucket cost as much as in the nearest bucket, plus the difference
        of a plain pass between both.
        """
        curve = self._curves.get((kind, bucket))
        if curve is None:
            plain, times = self._times["plain"].get(1, {}), self._times[kind]
            if kind == "chains":  # beyond the most verified rows, plain rounds tell
                most, all_plain = max(times, default=1), self._times["plain"].items()
                times = {**times, **{n: of for n, of in all_plain if n == 1 or n > most}}
            points = []
            for n_rows, buckets in times.items():
                at, seconds = _nearest(buckets, bucket)
                if plain and kind in PASSES:
                    seconds += _nearest(plain, bucket)[1] - _nearest(plain, at)[1]
                points.append((n_rows, max(seconds, 0.0)))
            curve = self._curves[kind, bucket] = Curve(points or [(1, 0.0)])
        return curve

    def _counts(self, shape: tuple[object, ...]) -> bool:
        """Counts a run; returns False for the first ones of its shape."""
        self._n_runs[shape] += 1
        return self._n_runs[shape] > N_FIRST

    def _file(self, kind: str, n_rows: int, bucket: int, seconds: float) -> None:
        self._times[kind].setdefault(n_rows, {}).setdefault(bucket, RunningMedian()).add(seconds)
        self._curves.clear()

    def to_dict(self) -> dict[str, Any]:
        """Returns all medians, as plain values."""
        times = [
            [kind, n_rows, bucket, median.value]
            for kind, known in self._times.items()
            for n_rows, buckets in known.items()
            for bucket, median in buckets.items()
        ]
        factors = [[*key, factor.value] for key, factor in self._factors.items()]
        return {"times": times, "factors": factors, "sample": self.sample.value}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> CostModel:
        """Restores `to_dict`. Errors: KeyError, ValueError or TypeError for anything else."""
        costs = cls()
        for kind, n_rows, bucket, seconds in stored["times"]:
            costs._times[str(kind)].setdefault(_count(n_rows), {})[int(bucket)] = _stored(seconds)
            costs._n_runs[kind, n_rows] = N_FIRST
        for n_sequences, is_tree, factor in stored["factors"]:
            costs._factors[_count(n_sequences), bool(is_tree)] = _stored(factor)
        costs.sample = _stored(stored["sample"])
        return costs


def _shapes(done: Round) -> tuple[tuple[Any, ...], tuple[str, int] | None]:
    """Returns the shapes of a round's pass and draft: kind and rows.

    A verify of a tree or of several sequences has a factor: its shape is sequences, is_tree, rows.
    """
    rows: tuple[Any, ...] = PASSES[done.n_drafted > 0], done.n_rows
    if done.n_drafted and (done.is_tree or done.n_sequences > 1):
        rows = done.n_sequences, done.is_tree, done.n_rows
    if not done.n_positions:
        return rows, None
    return rows, (_draft_kind(done.proposer, done.is_top1), done.n_draft_rows)


def _draft_kind(proposer: str, is_top1: bool) -> str:
    return f"{proposer} top1" if is_top1 else proposer


def _stored(seconds: Any) -> RunningMedian:
    return RunningMedian(*[number("a time", seconds, 0.0, 1e6)] * (N_TIMES // 3))


def _count(value: Any) -> int:
    return integer("a count", value, 1, 1 << 16)


def _bucket(position: int) -> int:
    return (position // CELLS).bit_length()


def _nearest(buckets: Buckets, bucket: int) -> tuple[int, float]:
    """Returns the nearest bucket, and its seconds."""
    at = min(buckets, key=lambda at: abs(at - bucket))
    return at, buckets[at].value
