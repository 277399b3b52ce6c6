"""What rounds cost on this machine: moving medians of measured times, and lines between them."""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..draft.tree import Tree

N_TIMES = 9
"""Times of a moving median."""
N_FEW = 4
"""Times of which the least counts, not yet the median."""
N_KEPT = 3
"""Times that a stored median counts as when it is loaded again."""
NOISE = 0.15
"""Part of a plain pass by which contexts must differ for it to be more than chance."""
CELLS = 256
"""Cells of the first bucket; each further one is twice as wide."""


@dataclass(slots=True)
class Round:
    """What a round did and took: one pass for one sequence or several.

    position: tokens in the caches before it, those of all its sequences. n_sequences: of them.
    n_positions: places a drafter filled for each that drafted; is_brief: whether only with best
    candidates. n_drafted: nodes verified below the roots. is_tree: whether they were more than
    chains. n_expected: those that were expected to be accepted. n_accepted: those that were.
    n_tokens: tokens the round added to answers.
    Seconds: choose_s, the decision what to draft, where one was made; draft_s, candidates and their
    choice; pass_s, the target's pass with what surrounds it; sample_s.
    """

    position: int
    n_sequences: int = 1
    n_positions: int = 0
    is_brief: bool = False
    n_drafted: int = 0
    is_tree: bool = False
    n_expected: float = 0.0
    n_accepted: int = 0
    n_tokens: int = 0
    choose_s: float = 0.0
    draft_s: float = 0.0
    pass_s: float = 0.0
    sample_s: float = 0.0

    def verifies(self, tree: Tree) -> None:
        """Adds what the target is given of one sequence."""
        self.n_drafted += tree.n_drafted
        self.is_tree |= not tree.is_chain
        self.n_expected += tree.n_expected

    @property
    def n_rows(self) -> int:
        """Rows of the pass."""
        return self.n_sequences + self.n_drafted

    @property
    def kind(self) -> str:
        """What was verified: "none", "chain" or "tree"."""
        return "tree" if self.is_tree else "chain" if self.n_drafted else "none"

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.choose_s + self.draft_s + self.pass_s + self.sample_s


class Costs:
    """Seconds of drafts by positions, and of passes by kind, rows and the tokens in the caches.

    A plain pass is a chain's of as many rows as sequences. n_observed: rounds filed by this
    process.
    """

    def __init__(self, n_first: int = 1) -> None:
        """n_first: runs of a shape that are slower than those to come."""
        self.n_first = n_first
        self.n_observed = 0
        self._drafts: dict[bool, dict[int, Median]] = {True: {}, False: {}}
        self._chains: dict[int, dict[int, Median]] = {}
        self._trees: dict[int, dict[int, Median]] = {}
        self._sample = Median()
        self._knows_plain = False
        self._curves: dict[tuple[bool, int], list[tuple[int, float, bool]]] = {}

    @property
    def knows_plain(self) -> bool:
        """Whether plain rounds were measured more than once."""
        self._knows_plain = self._knows_plain or self.knows_pass(1)
        return self._knows_plain

    @property
    def most_rows(self) -> int:
        """Rows of the largest pass that was run more than once."""
        chains = filter(self.knows_pass, self._chains)
        return max((*chains, *(n for n in self._trees if self.knows_pass(n, True))), default=0)

    @property
    def sample_s(self) -> float:
        """Choosing one token."""
        return self._sample.value

    def most_positions(self, is_brief: bool) -> int:
        """Positions of the longest draft of a kind that was run more than once."""
        known = self._drafts[is_brief]
        return max((n for n, median in known.items() if median.is_warm), default=0)

    def is_warm(self, done: Round) -> bool:
        """Whether rounds like this one have been through their first run."""
        n, drafts = done.n_positions, self._drafts[done.is_brief]
        is_drafted = not n or (n in drafts and drafts[n].is_warm)
        return is_drafted and self.knows_pass(done.n_rows, done.is_tree)

    def is_settled(self, done: Round) -> bool:
        """Whether a pass like this one's was filed so often that one time more changes little."""
        known = (self._trees if done.is_tree else self._chains).get(done.n_rows, {})
        median = known.get(_bucket(done.position))
        return median is not None and median.is_full

    def knows_pass(self, n_rows: int, is_tree: bool = False) -> bool:
        """Whether passes of so many rows were run more than once."""
        buckets = (self._trees if is_tree else self._chains).get(n_rows, {}).values()
        return any(median.is_warm for median in buckets)

    def observe(self, done: Round, *, with_draft: bool = True) -> None:
        """Files a round's times. with_draft: whether its draft was one like others."""
        self.n_observed += 1
        known = self._trees if done.is_tree else self._chains
        rows = known.setdefault(done.n_rows, {})
        rows.setdefault(_bucket(done.position), Median(self.n_first)).add(done.pass_s)
        if done.n_positions and with_draft:
            drafts = self._drafts[done.is_brief]
            drafts.setdefault(done.n_positions, Median(self.n_first)).add(done.draft_s)
        self._sample.add(done.sample_s / max(done.n_tokens, 1))
        self._curves.clear()

    def draft_s(self, n_positions: int, is_brief: bool) -> float:
        """A draft of so many positions; of a kind that was never run, as of the other."""
        known = self._drafts[is_brief] or self._drafts[not is_brief]
        points = ((n, median.value, median.is_warm) for n, median in known.items())
        return between(sorted(points), n_positions)

    def pass_s(self, position: int, n_rows: int, is_tree: bool = False) -> float:
        """A pass of so many rows after `position` tokens; a plain one must have been measured.

        What is not known of a tree is a chain's cost, times what the nearest tree costs more.
        """
        bucket = _bucket(position)
        chain_s = between(self._curve(bucket, False), n_rows)
        if not is_tree or not self._trees:
            return chain_s
        trees = self._curve(bucket, True)
        rows, tree_s, _ = min(trees, key=lambda point: (not point[2], abs(point[0] - n_rows)))
        if rows == n_rows:
            return tree_s
        return chain_s * tree_s / max(between(self._curve(bucket, False), rows), 1e-9)

    def round_s(self, done: Round) -> float:
        """What a round like this one is expected to take."""
        total = self.pass_s(done.position, done.n_rows, done.is_tree)
        total += done.n_tokens * self.sample_s
        return total + (self.draft_s(done.n_positions, done.is_brief) if done.n_positions else 0.0)

    def plain_s(self, position: int, n_sequences: int = 1) -> float:
        """A plain round."""
        if n_sequences not in self._chains:
            return self.pass_s(position, n_sequences) + n_sequences * self.sample_s
        median = _nearest(self._chains[n_sequences], _bucket(position))[1]
        return median.value + n_sequences * self.sample_s

    def _curve(self, bucket: int, is_tree: bool) -> list[tuple[int, float, bool]]:
        """Rows, seconds, and whether that is more than a first time, ascending by rows.

        A row count that was not run in this bucket takes the nearest one's, and what a plain pass
        costs more here than there.
        """
        key = (is_tree, bucket)
        if key not in self._curves:
            plain = self._chains.get(1, {})
            here = _nearest(plain, bucket)[1].value if plain else 0.0
            points = []
            for rows, buckets in sorted((self._trees if is_tree else self._chains).items()):
                at, median = _nearest(buckets, bucket)
                more = here - _nearest(plain, at)[1].value if plain else 0.0
                more = more if abs(more) > NOISE * here else 0.0
                points.append((rows, max(median.value + more, 0.0), median.is_warm))
            self._curves[key] = points
        return self._curves[key]

    def to_dict(self) -> dict[str, Any]:
        """All medians that are more than a first time, as plain values."""

        def table(known: dict[int, dict[int, Median]]) -> list[list[float]]:
            return [
                [rows, bucket, median.value]
                for rows, buckets in sorted(known.items())
                for bucket, median in sorted(buckets.items())
                if median.is_warm
            ]

        drafts = [
            [n, is_brief, median.value]
            for is_brief, known in self._drafts.items()
            for n, median in sorted(known.items())
            if median.is_warm
        ]
        return {
            "drafts": drafts,
            "chains": table(self._chains),
            "trees": table(self._trees),
            "sample": self._sample.value,
        }

    @classmethod
    def from_dict(cls, stored: dict[str, Any], n_first: int = 1) -> Costs:
        """What `to_dict` gave; ValueError or TypeError for anything else."""
        costs = cls(n_first)
        for n, is_brief, seconds in stored["drafts"]:
            costs._drafts[bool(is_brief)][_count(n)] = Median.known(seconds)
        for name, known in (("chains", costs._chains), ("trees", costs._trees)):
            for rows, bucket, seconds in stored[name]:
                known.setdefault(_count(rows), {})[int(bucket)] = Median.known(seconds)
        costs._sample = Median.known(stored["sample"])
        return costs


class Median:
    """Median of the last times. The first ones do not count once there are others.

    The first run of a shape builds its graph and warms its kernels; where graphs are captured, the
    second does that.
    """

    def __init__(self, n_first: int = 1) -> None:
        """n_first: runs that are slower than those to come."""
        self._n_first = n_first
        self._times: deque[float] = deque(maxlen=N_TIMES)
        self._is_warm = False
        self.value = 0.0

    @classmethod
    def known(cls, seconds: float) -> Median:
        """One that was measured in another process; new times soon outweigh it."""
        if not 0.0 <= float(seconds) < 1e6:
            raise ValueError(f"a time of {seconds} seconds")
        median = cls()
        median._times.extend([float(seconds)] * N_KEPT)
        median._is_warm = True
        median.value = float(seconds)
        return median

    @property
    def is_warm(self) -> bool:
        """Whether there is more than the first times."""
        return self._is_warm

    @property
    def is_full(self) -> bool:
        """Whether a further time replaces one."""
        return len(self._times) == N_TIMES

    def add(self, seconds: float) -> None:
        """Adds a time."""
        if len(self._times) == self._n_first and not self._is_warm:
            self._is_warm = True
            self._times.clear()
        self._times.append(seconds)
        # Noise only adds; what seems slow by a single outlier would never be tried again.
        times = sorted(self._times)
        at = len(times) // 2
        middle = times[at] if len(times) % 2 else (times[at - 1] + times[at]) / 2
        self.value = times[0] if len(times) < N_FEW else middle


def _count(value: Any) -> int:
    if not 1 <= int(value) <= 1 << 16:
        raise ValueError(f"a count of {value}")
    return int(value)


def _bucket(position: int) -> int:
    return (position // CELLS).bit_length()


def _nearest(buckets: dict[int, Median], bucket: int) -> tuple[int, Median]:
    """The median of the bucket, or of the nearest; warm ones first."""
    return min(buckets.items(), key=lambda item: (not item[1].is_warm, abs(item[0] - bucket)))


def between(points: Sequence[tuple[int, float, bool]], x: int) -> float:
    """The cost at x: on straight lines between what is known, beyond as it rose so far.

    points: (x, seconds, whether it is more than a first time), ascending. First times stand for
    something only where nothing else is known. Beyond, the last step alone would mislead: it may
    be where a kernel ends.
    """
    known = [(at, seconds) for at, seconds, is_warm in points if is_warm]
    known = known or [(at, seconds) for at, seconds, _ in points]
    if len(known) < 2:
        return known[0][1] if known else 0.0
    (x0, y0), (x1, y1) = known[0], known[-1]
    if x < x1:
        above = max(bisect([at for at, _ in known], x), 1)
        (x0, y0), (x1, y1) = known[above - 1], known[above]
    value = y1 + (y1 - y0) / (x1 - x0) * (x - x1)
    return max(value, y1) if x > x1 else max(value, 0.0)
