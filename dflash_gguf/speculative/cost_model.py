"""Measured seconds of passes and drafts, by rows, sequences and cached tokens.

Each time is a median of the last measurements; times between measured sizes are interpolated.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from .._validate import integer, number
from .tree import Tree

N_TIMES = 9
"""Number of measurements in a running median. Below a third of this number the minimum is used, as
noise only adds time."""
N_FIRST = 2
"""First runs of a batch shape whose times are dropped: they build the graph (CUDA: capture it)."""
SHORTEST = 1e-9
"""Shortest stored time of a pass in seconds, as decisions divide by such times."""
ROW = 0.25
"""Cost of a draft and of each further row, as a fraction of a plain pass, until it is measured."""
CELLS = 256
"""Cached tokens in the first bucket of times; the others end at 2, 4, 8 ... times this number."""
PASSES = ("plain", "chains")
"""Kinds of measured target passes; `_draft_kind` names the kinds of measured drafts."""


@dataclass(slots=True)
class Round:
    """Work and times of one round: one pass for one or several decoding sequences.

    position: cached tokens of all sequences before the round. n_sequences: decoding sequences.
    n_undrafted: decoding sequences without speculation. is_timing_shared: True if other work ran
    too, so that the seconds are not filed. asked: names of all proposers, run or not, and of
    forced tokens if an answer is constrained. proposer: name of the proposer that ran a forward
    pass, if any. n_positions, n_draft_rows: longest draft, and rows of the proposer's pass.
    is_top1: True for a top-1 draft. free: names of proposers with candidates that needed no pass.
    n_drafted: verified nodes below the roots. is_tree: True if a verified tree has branches.
    n_accepted: accepted candidates. n_tokens: tokens added to answers. choose_s: seconds of
    deciding, and of learning from the round before. draft_s: seconds of proposing and selecting.
    pass_s: seconds of the target's pass and of batching. sample_s: seconds of sampling.
    """

    position: int
    n_sequences: int = 1
    n_undrafted: int = 0
    is_timing_shared: bool = False
    asked: tuple[str, ...] = ()
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
        """Adds the nodes of one sequence's verified tree to the round's counts."""
        self.n_drafted += tree.n_drafted
        self.is_tree |= not tree.is_chain

    @property
    def n_rows(self) -> int:
        """Number of rows in the round's pass of the target."""
        return self.n_sequences + self.n_drafted

    @property
    def is_plain(self) -> bool:
        """True if the round ran no proposer's forward pass and verified no candidates."""
        return not (self.n_drafted or self.n_positions)

    @property
    def n_asked(self) -> int:
        """Number of decoding sequences with speculation in the round."""
        return self.n_sequences - self.n_undrafted

    @property
    def seconds(self) -> float:
        """Duration of the whole round in seconds."""
        return self.choose_s + self.draft_s + self.pass_s + self.sample_s


class RunningMedian:
    """Median of the last N_TIMES measured times in seconds; 0 before the first one."""

    def __init__(self, *times: float) -> None:
        self._times: deque[float] = deque(maxlen=N_TIMES)
        self.value = 0.0
        for seconds in times:
            self.add(seconds)

    @property
    def is_sure(self) -> bool:
        """True if the median has enough times to be unaffected by a single outlier."""
        return 3 * len(self._times) >= N_TIMES

    def add(self, seconds: float) -> bool:
        """Adds a measured time in seconds; returns True if this changes the value."""
        before = self.value
        self._times.append(seconds)
        times, n = sorted(self._times), len(self._times)
        self.value = (times[(n - 1) // 2] + times[n // 2]) / 2.0 if self.is_sure else times[0]
        return self.value != before


class Curve:
    """A curve of seconds by rows: interpolated, and extrapolated by the mean slope."""

    def __init__(self, points: Iterable[tuple[int, float]]) -> None:
        found = sorted(points)
        self._xs = [n_rows for n_rows, _ in found]
        self._ys = list(accumulate((seconds for _, seconds in found), max))

    def at(self, n_rows: int) -> float:
        """Returns the seconds of a pass or draft with n_rows rows."""
        xs, ys = self._xs, self._ys
        if len(xs) == 1:
            ratio = 1.0 + ROW * abs(n_rows - xs[0])
            return ys[0] * ratio if n_rows > xs[0] else ys[0] / ratio
        if n_rows >= xs[-1]:  # mean slope, as the last interval may hold a jump
            return ys[-1] + (ys[-1] - ys[0]) / (xs[-1] - xs[0]) * (n_rows - xs[-1])
        i = max(bisect(xs, n_rows), 1)
        slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
        return max(ys[i] + slope * (n_rows - xs[i]), SHORTEST)


Buckets = dict[int, RunningMedian]
"""Measured times of one kind of pass and one number of rows, by bucket of cached tokens."""


class CostModel:
    """Cost model of plain passes, verifies (chains and trees) and drafts.

    A verify of n sequences costs as much as a chain of as many rows, plus what a plain pass of n
    sequences costs beyond a chain of n rows, times a factor measured for n and for trees.
    """

    def __init__(self) -> None:
        self.n_observed = 0
        """Number of rounds that this process has filed in the cost model."""
        self.sample = RunningMedian()
        """Seconds of sampling one token."""
        # Keys of _times: kind of pass, rows. Keys of _factors: number of sequences, is_tree.
        self._times: defaultdict[str, dict[int, Buckets]] = defaultdict(dict)
        self._factors: dict[tuple[int, bool], RunningMedian] = {}
        self._n_runs: Counter[tuple[object, ...]] = Counter()
        # Caches curves by kind and bucket; a changed time drops the curves of its kind.
        self._curves: defaultdict[str, dict[int, Curve]] = defaultdict(dict)

    def knows_plain(self, n_sequences: int = 1) -> bool:
        """Returns True if a plain pass of n_sequences to 2 * n_sequences - 1 was timed."""
        return any(n in self._times["plain"] for n in range(n_sequences, 2 * n_sequences))

    def observe(self, done: Round) -> None:
        """Files the measured times of a round, but not those of a batch shape's first runs."""
        self.n_observed += 1
        rows, draft = _shapes(done)
        if draft is not None and self._counts(draft):
            self._file(*draft, 0, done.draft_s + done.choose_s)
        if self._counts(rows):
            bucket = _bucket(done.position)
            if len(rows) == 2:
                self._file(*rows, bucket, done.pass_s)
            else:
                (chains_s,) = self._chains_s(bucket, (done.n_rows,), done.n_sequences)
                factor = self._factors.setdefault(rows[:2], RunningMedian())
                factor.add(done.pass_s / max(chains_s, 1e-9))
        self.sample.add(done.sample_s / max(done.n_tokens, 1))

    def expected_s(self, done: Round) -> float:
        """Returns the expected seconds of a round with the rows of `done` and no prefill."""
        draft_s = 0.0
        if done.n_positions:
            draft_s = self.draft_s(done.proposer, done.n_draft_rows, done.is_top1)
        pass_s = self.pass_s(done.position, done.n_rows, done.is_tree, done.n_sequences)
        return draft_s + pass_s + done.n_tokens * self.sample.value

    def draft_s(self, proposer: str, n_rows: int, is_top1: bool) -> float:
        """Returns a draft's seconds, with those of deciding and learning.

        An unmeasured kind (top-1, ranked) takes the other kind's.
        """
        for kind in (_draft_kind(proposer, is_top1), _draft_kind(proposer, not is_top1)):
            if self._times[kind]:
                return self._curve(kind, 0).at(n_rows)
        return ROW * self.plain_s(0)

    def plain_s(self, position: int, n_sequences: int = 1) -> float:
        """Returns the seconds of a plain round with `position` cached tokens, sampling included."""
        pass_s = self._curve("plain", _bucket(position)).at(n_sequences)
        return pass_s + n_sequences * self.sample.value

    def passes_s(
        self, position: int, counts: Iterable[int], is_tree: bool = False, n_sequences: int = 1
    ) -> list[float]:
        """Returns the seconds of passes of counts[i] rows after `position` tokens."""
        chains_s = self._chains_s(_bucket(position), counts, n_sequences)
        if not (is_tree or n_sequences > 1):
            return chains_s
        known = [key for key, factor in self._factors.items() if factor.is_sure]
        if not known:
            return chains_s
        # Prefer the cost factor of the same kind (tree, chain), then of the nearest n_sequences.
        key = min(known, key=lambda key: (key[1] != is_tree, abs(key[0] - n_sequences)))
        if key[0] == 1 and not is_tree:
            return chains_s
        factor = self._factors[key].value
        return [factor * seconds for seconds in chains_s]

    def pass_s(
        self, position: int, n_rows: int, is_tree: bool = False, n_sequences: int = 1
    ) -> float:
        """Returns the seconds of one pass of n_rows rows with `position` cached tokens."""
        return self.passes_s(position, (n_rows,), is_tree, n_sequences)[0]

    def _chains_s(self, bucket: int, counts: Iterable[int], n_sequences: int) -> list[float]:
        chains, more_s = self._curve("chains", bucket), 0.0
        if n_sequences > 1:
            more_s = self._curve("plain", bucket).at(n_sequences) - chains.at(n_sequences)
        return [max(chains.at(n) + more_s, 0.0) for n in counts]

    def _curve(self, kind: str, bucket: int) -> Curve:
        """Returns the curve of seconds by rows for a bucket of cached tokens; 0 if none is known.

        A missing time is that of the nearest bucket, corrected by the plain passes of both buckets.
        """
        curve = self._curves[kind].get(bucket)
        if curve is None:
            plain, times = self._times["plain"].get(1, {}), self._times[kind]
            if kind == "chains":  # a chain longer than any measured takes a plain pass's time
                most, all_plain = max(times, default=1), self._times["plain"].items()
                times = {**times, **{n: of for n, of in all_plain if n == 1 or n > most}}
            points = []
            for n_rows, buckets in times.items():
                at, seconds = _nearest(buckets, bucket)
                if at != bucket and plain and kind in PASSES:
                    seconds += _nearest(plain, bucket)[1] - _nearest(plain, at)[1]
                points.append((n_rows, max(seconds, 0.0)))
            curve = self._curves[kind][bucket] = Curve(points or [(1, 0.0)])
        return curve

    def _counts(self, shape: tuple[object, ...]) -> bool:
        self._n_runs[shape] += 1
        return self._n_runs[shape] > N_FIRST

    def _file(self, kind: str, n_rows: int, bucket: int, seconds: float) -> None:
        buckets = self._times[kind].setdefault(n_rows, {})
        is_new = bucket not in buckets
        if is_new:
            buckets[bucket] = RunningMedian()
        if buckets[bucket].add(seconds) or is_new:
            for changed in PASSES if kind == "plain" else (kind,):
                self._curves[changed].clear()

    def to_dict(self) -> dict[str, Any]:
        """Returns all medians of the cost model as JSON-serialisable values."""
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
        """Restores a cost model from `to_dict`; KeyError, ValueError or TypeError if invalid."""
        costs = cls()
        for kind, n_rows, bucket, seconds in stored["times"]:
            time = _stored(seconds, SHORTEST if kind in PASSES else 0.0)
            costs._times[str(kind)].setdefault(_count(n_rows), {})[int(bucket)] = time
            costs._n_runs[kind, n_rows] = N_FIRST
        for n_sequences, is_tree, factor in stored["factors"]:
            costs._factors[_count(n_sequences), bool(is_tree)] = _stored(factor, SHORTEST)
        costs.sample = _stored(stored["sample"])
        return costs


def _shapes(done: Round) -> tuple[tuple[Any, ...], tuple[str, int] | None]:
    """Returns the cost model's keys of a round's pass and of its draft (None without one)."""
    rows: tuple[Any, ...] = PASSES[done.n_drafted > 0], done.n_rows
    if done.n_drafted and (done.is_tree or done.n_sequences > 1):
        rows = done.n_sequences, done.is_tree, done.n_rows
    if not done.n_positions:
        return rows, None
    return rows, (_draft_kind(done.proposer, done.is_top1), done.n_draft_rows)


def _draft_kind(proposer: str, is_top1: bool) -> str:
    return f"{proposer} top1" if is_top1 else proposer


def _stored(seconds: Any, least: float = 0.0) -> RunningMedian:
    return RunningMedian(*[number("a time", seconds, least, 1e6)] * (N_TIMES // 3))


def _count(value: Any) -> int:
    return integer("a count", value, 1, 1 << 16)


def _bucket(position: int) -> int:
    return (position // CELLS).bit_length()


def _nearest(buckets: Buckets, bucket: int) -> tuple[int, float]:
    at = bucket if bucket in buckets else min(buckets, key=lambda at: abs(at - bucket))
    return at, buckets[at].value
