"""What rounds cost on this machine: moving medians of measured times, and lines between them."""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..draft.tree import Tree

N_TIMES = 9
"""Times of a moving median."""
N_FEW = 3
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
    n_rounds: plain rounds that this stands for, one after the other.
    n_positions: places a drafter filled for each that drafted; is_brief: whether only with best
    candidates; is_mixed: whether others had proposed as well.
    n_drafted: nodes verified below the roots. is_tree: whether they were more than chains.
    n_expected: those that were expected to be accepted. n_accepted: those that were.
    n_tokens: tokens the round added to answers.
    Seconds: choose_s, the decision what to draft, where one was made; draft_s, candidates and their
    choice; pass_s, the target's pass with what surrounds it; sample_s.
    """

    position: int
    n_sequences: int = 1
    n_positions: int = 0
    is_brief: bool = False
    is_mixed: bool = False
    n_drafted: int = 0
    is_tree: bool = False
    n_expected: float = 0.0
    n_accepted: int = 0
    n_tokens: int = 0
    choose_s: float = 0.0
    draft_s: float = 0.0
    pass_s: float = 0.0
    sample_s: float = 0.0
    n_rounds: int = 1

    def adds(self, other: Round) -> None:
        """Takes up another plain round."""
        self.n_rounds += 1
        self.n_tokens += other.n_tokens
        self.pass_s += other.pass_s
        self.sample_s += other.sample_s

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
        self.first_s = 0.0
        """What the first pass of a size took beyond the second, lately."""
        self._drafts: dict[bool, dict[int, Median]] = {True: {}, False: {}}
        self._chains: dict[int, dict[int, Median]] = {}
        self._trees: dict[int, dict[int, Median]] = {}
        self._sample, self._ask = Median(), Median()
        self._knows_plain = False
        self._lines: dict[tuple[str, int], Line] = {}
        self._plain: dict[tuple[int, int], float] = {}
        self._most_rows: int | None = None

    @property
    def knows_plain(self) -> bool:
        """Whether plain rounds of answers were measured more than once."""
        if not self._knows_plain:
            plain = self._chains.get(1, {}).values()
            self._knows_plain = any(x.is_warm and not x.is_guess for x in plain)
        return self._knows_plain

    @property
    def most_rows(self) -> int:
        """Rows of the largest pass that was run more than once."""
        if self._most_rows is None:
            chains = filter(self.knows_pass, self._chains)
            trees = (n for n in self._trees if self.knows_pass(n, True))
            self._most_rows = max((*chains, *trees), default=0)
        return self._most_rows

    @property
    def ask_s(self) -> float:
        """Taking up candidates that took no draft."""
        return self._ask.value

    def are_guesses(self) -> None:
        """All that is known so far gives way to what rounds of answers take."""
        for known in (self._drafts[True], self._drafts[False]):
            for median in known.values():
                median.is_guess = True
        for passes in (self._chains, self._trees):
            for buckets in passes.values():
                for median in buckets.values():
                    median.is_guess = True
        self._sample = Median()

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
        pass_s = done.pass_s / done.n_rounds
        median = rows.setdefault(_bucket(done.position), Median(self.n_first))
        first_s = median.value if not median.is_warm else 0.0
        median.add(pass_s)
        if first_s > 0.0 and median.is_warm:
            self.first_s += (max(first_s - pass_s, 0.0) - self.first_s) / 2.0
        if done.n_positions and with_draft:
            drafts = self._drafts[done.is_brief]
            drafts.setdefault(done.n_positions, Median(self.n_first)).add(done.draft_s)
        if done.n_drafted and not done.n_positions:
            self._ask.add(done.draft_s)
        self._sample.add(done.sample_s / max(done.n_tokens, 1))
        self._lines.clear()
        self._plain.clear()
        self._most_rows = None

    def draft_s(self, n_positions: int, is_brief: bool) -> float:
        """A draft of so many positions; of a kind that was never run, as of the other."""
        key = ("brief" if is_brief else "ranked", 0)
        if key not in self._lines:
            known = self._drafts[is_brief] or self._drafts[not is_brief]
            points = ((n, median.value, median.is_warm) for n, median in known.items())
            self._lines[key] = Line(points)
        return self._lines[key].at(n_positions)

    def pass_s(self, position: int, n_rows: int, is_tree: bool = False) -> float:
        """A pass of so many rows after `position` tokens; a plain one must have been measured.

        What is not known of a tree is a chain's cost, times what the nearest tree costs more.
        """
        bucket = _bucket(position)
        chains = self._line("chain", bucket)
        if not is_tree or not self._trees:
            return chains.at(n_rows)
        trees = self._line("tree", bucket)
        rows = trees.nearest(n_rows)
        if rows == n_rows:
            return trees.at(n_rows)
        return chains.at(n_rows) * trees.at(rows) / max(chains.at(rows), 1e-9)

    def round_s(self, done: Round) -> float:
        """What a round like this one is expected to take."""
        total = self.pass_s(done.position, done.n_rows, done.is_tree)
        total += done.n_tokens * self.sample_s
        return total + (self.draft_s(done.n_positions, done.is_brief) if done.n_positions else 0.0)

    def plain_s(self, position: int, n_sequences: int = 1) -> float:
        """A plain round."""
        key = n_sequences, _bucket(position)
        if key not in self._plain:
            if n_sequences in self._chains:
                pass_s = _nearest(self._chains[n_sequences], key[1])[1].value
            else:
                pass_s = self.pass_s(position, n_sequences)
            self._plain[key] = pass_s + n_sequences * self.sample_s
        return self._plain[key]

    def _line(self, kind: str, bucket: int) -> Line:
        """Seconds of chains or trees by rows.

        A row count that was not run in this bucket takes the nearest one's, and what a plain pass
        costs more here than there.
        """
        key = kind, bucket
        if key not in self._lines:
            plain = self._chains.get(1, {})
            here = _nearest(plain, bucket)[1].value if plain else 0.0
            points = []
            for rows, buckets in (self._trees if kind == "tree" else self._chains).items():
                at, median = _nearest(buckets, bucket)
                more = here - _nearest(plain, at)[1].value if plain else 0.0
                more = more if abs(more) > NOISE * here else 0.0
                points.append((rows, max(median.value + more, 0.0), median.is_warm))
            self._lines[key] = Line(points)
        return self._lines[key]

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
            "ask": self._ask.value,
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
        costs._ask = Median.known(stored["ask"])
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
        self.is_guess = False
        """Whether it was not measured in answers: the first time that is takes its place."""
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
        if self.is_guess:
            self.is_guess = False
            self._times.clear()
        elif len(self._times) == self._n_first and not self._is_warm:
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


class Line:
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

    def nearest(self, x: int) -> int:
        """The known place that is nearest, the lower one on ties."""
        return min(self._xs, key=lambda known: abs(known - x))

    def at(self, x: int) -> float:
        """The cost at x; 0 where nothing is known."""
        xs, ys = self._xs, self._ys
        if len(xs) < 2:
            return ys[0] if ys else 0.0
        if x >= xs[-1]:
            return max(ys[-1] + (ys[-1] - ys[0]) / (xs[-1] - xs[0]) * (x - xs[-1]), ys[-1])
        i = max(bisect(xs, x), 1)
        slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
        return max(ys[i] + slope * (x - xs[i]), 0.0)
