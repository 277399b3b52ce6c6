"""Seconds of rounds on this machine, by rows, sequences and tokens in the caches, as measured.

A time is the median of the last ones. Sizes that were never run lie on lines between those that
were, and more rows never take less.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._validate import integer, number
from .tree import Tree

N_TIMES = 9
"""Times of a running median; of fewer than a third of them the least counts, as noise only adds."""
N_FIRST = 2
"""Runs of a shape that are slower than later ones: the first builds its graph, and on CUDA the
second captures it."""
N_STORED = 3
"""Times that a median counts as when it comes from a file."""
CELLS = 256
"""Tokens in the caches of the first bucket; each further bucket is twice as wide."""
PASSES, DRAFTS = ("plain", "chains"), ("ranked", "brief")
"""Kinds of passes of the target, without drafts and with some; kinds of drafts: all, and top-1."""


@dataclass(slots=True)
class Round:
    """What a round did and took: one pass for one sequence or several.

    position: tokens in the caches before it, those of all its sequences. n_sequences: of them, each
    with a token at least; n_undrafted: those of these that nobody was asked for.
    is_timing_shared: whether its pass did more than that, so that its seconds do not say what it
    costs.
    proposer: whose draft took a pass, if any did; n_positions: most places that it filled for one;
    n_draft_rows: rows of its pass; is_top1: whether only with best candidates. free: proposers that
    need no pass and had candidates.
    n_drafted: nodes verified below the roots. is_tree: whether they were more than chains.
    n_accepted: those of them that were accepted.
    n_tokens: tokens the round added to answers.
    Seconds: choose_s, the decision what to draft, where one was made; draft_s, candidates and their
    choice; pass_s, the target's pass with what surrounds it; sample_s.
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
        """Adds what the target is given of one sequence."""
        self.n_drafted += tree.n_drafted
        self.is_tree |= not tree.is_chain

    @property
    def n_rows(self) -> int:
        """Rows of the pass."""
        return self.n_sequences + self.n_drafted

    @property
    def is_plain(self) -> bool:
        """Whether nothing was drafted that takes time, and nothing verified."""
        return not (self.n_drafted or self.n_positions)

    @property
    def n_asked(self) -> int:
        """Sequences that candidates are wanted for."""
        return self.n_sequences - self.n_undrafted

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.choose_s + self.draft_s + self.pass_s + self.sample_s


class RunningMedian:
    """Median of the last times, in seconds; those of first runs count only until there are others.

    is_warm: True once there are others.
    """

    def __init__(self, n_first: int = N_FIRST) -> None:
        """n_first: runs that are slower than later ones."""
        self._n_first = n_first
        self._times: deque[float] = deque(maxlen=N_TIMES)
        self.value = 0.0
        self.is_warm = False

    @classmethod
    def stored(cls, seconds: float) -> RunningMedian:
        """Restores one from a file. Errors: ValueError for anything but a time."""
        median = cls()
        median.value = number("a time", seconds, 0.0, 1e6)
        median._times.extend([median.value] * N_STORED)
        median.is_warm = True
        return median

    @property
    def is_sure(self) -> bool:
        """True if a single time does not decide it."""
        return 3 * len(self._times) >= N_TIMES

    def add(self, seconds: float) -> None:
        """Adds a time."""
        if len(self._times) == self._n_first and not self.is_warm:
            self.is_warm = True
            self._times.clear()
        self._times.append(seconds)
        times = sorted(self._times)
        n = len(times)
        self.value = times[0] if 3 * n < N_TIMES else (times[(n - 1) // 2] + times[n // 2]) / 2.0


class Curve:
    """Seconds by rows: rising lines between known points; beyond, as they rose so far."""

    def __init__(self, points: Iterable[tuple[int, float, bool]]) -> None:
        """points: rows, seconds, and whether they are warm; others count only without warm ones."""
        found = sorted(points)
        found = [point for point in found if point[2]] or found
        self._xs = [rows for rows, _, _ in found]
        self._ys = list(accumulate((seconds for _, seconds, _ in found), max))

    def at(self, n_rows: int) -> float:
        """Returns seconds; 0 if nothing is known."""
        xs, ys = self._xs, self._ys
        if len(xs) < 2:
            return ys[0] if ys else 0.0
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
        self._times: dict[str, dict[int, Buckets]] = {kind: {} for kind in (*PASSES, *DRAFTS)}
        self._factors: dict[tuple[int, bool], RunningMedian] = {}  # by sequences, trees
        self._n_runs: Counter[tuple[int, bool, int]] = Counter()  # of shapes that have a factor
        self._curves: dict[tuple[str, int], Curve] = {}

    @property
    def knows_plain(self) -> bool:
        """True if plain rounds of answers were measured more than once."""
        return any(self._is_warm("plain", n) for n in self._times["plain"])

    def knows_plain_of(self, n_sequences: int) -> bool:
        """True if plain rounds were, of as many sequences or of less than twice as many."""
        return any(self._is_warm("plain", n) for n in range(n_sequences, 2 * n_sequences))

    def is_warm(self, done: Round) -> bool:
        """True if such passes, and such drafts, were run more than once."""
        if done.n_positions and not self._is_warm(DRAFTS[done.is_top1], done.n_draft_rows):
            return False
        if _has_factor(done):
            return self._n_runs[_shape(done)] >= N_FIRST
        return self._is_warm(PASSES[done.n_drafted > 0], done.n_rows)

    def observe(self, done: Round) -> None:
        """Files a round's times."""
        self.n_observed += 1
        key = done.n_sequences, done.is_tree
        if _has_factor(done):
            if self._n_runs[_shape(done)] >= N_FIRST:
                told_s = self._chains_s(_bucket(done.position), (done.n_rows,), done.n_sequences)
                factor = self._factors.setdefault(key, RunningMedian(0))
                factor.add(done.pass_s / max(float(told_s[0]), 1e-9))
            self._n_runs[_shape(done)] += 1
        else:
            self._file(PASSES[done.n_drafted > 0], done.n_rows, _bucket(done.position), done.pass_s)
        if done.n_positions:
            self._file(DRAFTS[done.is_top1], done.n_draft_rows, 0, done.draft_s)
        self.sample.add(done.sample_s / max(done.n_tokens, 1))

    def expected_s(self, done: Round) -> float:
        """Seconds of a round whose pass does nothing else."""
        draft_s = self.draft_s(done.n_draft_rows, done.is_top1) if done.n_positions else 0.0
        pass_s = self.pass_s(done.position, done.n_rows, done.is_tree, done.n_sequences)
        return draft_s + pass_s + done.n_tokens * self.sample.value

    def draft_s(self, n_rows: int, is_top1: bool) -> float:
        """Seconds of a draft; of a kind that was never run, of the other."""
        kinds = [kind for kind in (DRAFTS[is_top1], DRAFTS[not is_top1]) if self._times[kind]]
        return self._curve(kinds[0], 0).at(n_rows) if kinds else 0.0

    def plain_s(self, position: int, n_sequences: int = 1) -> float:
        """Seconds of a plain round after `position` tokens."""
        pass_s = self._curve("plain", _bucket(position)).at(n_sequences)
        return pass_s + n_sequences * self.sample.value

    def passes_s(
        self, position: int, counts: Iterable[int], is_tree: bool = False, n_sequences: int = 1
    ) -> NDArray[np.float64]:
        """Seconds of passes with so many rows after `position` tokens."""
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
        """Seconds of one such pass."""
        return float(self.passes_s(position, (n_rows,), is_tree, n_sequences)[0])

    def _chains_s(
        self, bucket: int, counts: Iterable[int], n_sequences: int
    ) -> NDArray[np.float64]:
        chains, more_s = self._curve("chains", bucket), 0.0
        if n_sequences > 1:
            more_s = self._curve("plain", bucket).at(n_sequences) - chains.at(n_sequences)
        return np.array([max(chains.at(n) + more_s, 0.0) for n in counts])

    def _is_warm(self, kind: str, n_rows: int) -> bool:
        return any(median.is_warm for median in self._times[kind].get(n_rows, {}).values())

    def _curve(self, kind: str, bucket: int) -> Curve:
        """Seconds by rows in a bucket.

        Rows that were not run in the bucket cost what they do in the nearest one, and what a plain
        pass costs more here than there.
        """
        curve = self._curves.get((kind, bucket))
        if curve is None:
            plain, times = self._times["plain"].get(1, {}), self._times[kind]
            if kind == "chains":  # as far as they go; beyond, only plain rounds are known
                most, all_plain = max(times, default=1), self._times["plain"].items()
                times = {**times, **{n: of for n, of in all_plain if n == 1 or n > most}}
            points = []
            for n_rows, buckets in times.items():
                at, median = _nearest(buckets, bucket)
                more_s = 0.0
                if plain and at != bucket and kind in PASSES:
                    more_s = _nearest(plain, bucket)[1].value - _nearest(plain, at)[1].value
                points.append((n_rows, max(median.value + more_s, 0.0), median.is_warm))
            curve = self._curves[kind, bucket] = Curve(points)
        return curve

    def _file(self, kind: str, n_rows: int, bucket: int, seconds: float) -> None:
        buckets = self._times[kind].setdefault(n_rows, {})
        buckets.setdefault(bucket, RunningMedian()).add(seconds)
        self._curves.clear()

    def to_dict(self) -> dict[str, Any]:
        """Returns all warm medians, as plain values."""
        found: dict[str, Any] = {
            kind: [
                [n_rows, bucket, median.value]
                for n_rows, buckets in sorted(known.items())
                for bucket, median in sorted(buckets.items())
                if median.is_warm
            ]
            for kind, known in self._times.items()
        }
        found["factors"] = [
            [*key, factor.value] for key, factor in sorted(self._factors.items()) if factor.is_warm
        ]
        return {**found, "sample": self.sample.value}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> CostModel:
        """Restores `to_dict`. Errors: KeyError, ValueError or TypeError for anything else."""
        costs = cls()
        for kind, known in costs._times.items():
            for n_rows, bucket, seconds in stored[kind]:
                median = RunningMedian.stored(seconds)
                known.setdefault(_count(n_rows), {})[int(bucket)] = median
        for n_sequences, is_tree, factor in stored["factors"]:
            costs._factors[_count(n_sequences), bool(is_tree)] = RunningMedian.stored(factor)
        costs.sample = RunningMedian.stored(stored["sample"])
        return costs


def _shape(done: Round) -> tuple[int, bool, int]:
    return done.n_sequences, done.is_tree, done.n_rows


def _has_factor(done: Round) -> bool:
    return done.n_drafted > 0 and (done.is_tree or done.n_sequences > 1)


def _count(value: Any) -> int:
    return integer("a count", value, 1, 1 << 16)


def _bucket(position: int) -> int:
    return (position // CELLS).bit_length()


def _nearest(buckets: Buckets, bucket: int) -> tuple[int, RunningMedian]:
    """The median of the bucket, or of the nearest; warm ones first."""
    return min(buckets.items(), key=lambda item: (not item[1].is_warm, abs(item[0] - bucket)))
