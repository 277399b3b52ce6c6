"""What rounds cost on this machine, by their rows, sequences and contexts: as was measured.

Times of passes and drafts are medians of the last ones (statistics.py); sizes that were never run
lie on lines between those that were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .._validate import integer
from .statistics import ExpertCosts, Interpolator, RunningMedian
from .tree import Tree

NOISE = 0.15
"""Part of a plain pass by which contexts must differ for it to be more than chance."""
CELLS = 256
"""Cells of the first bucket; each further one is twice as wide."""
SIGNIFICANT_CHANGE = 0.03
"""Part of a time by which it must change for what follows from it to be counted anew at once: less
than passes of one size differ by chance, and of the first nine of a size one in three is more."""
PASSES = ("chains", "trees", "plain")
"""Kinds of passes of the target."""


@dataclass(slots=True)
class Round:
    """What a round did and took: one pass for one sequence or several.

    position: tokens in the caches before it, those of all its sequences. n_sequences: of them, each
    with a token at least; n_undrafted: those of these that nobody was asked for.
    is_timing_shared: whether its pass did more than that, so that its seconds do not say what it
    costs.
    n_rounds: plain rounds that this stands for, one after the other.
    n_positions: places a drafter filled for each that drafted, n_draft_rows_saved: rows that it had
    less as some need fewer places or none; is_top1: whether only with best candidates;
    has_both_kinds: whether others had proposed as well.
    n_drafted: nodes verified below the roots. is_tree: whether they were more than chains.
    n_expected: those that were expected to be accepted. n_accepted: those that were;
    n_lookup_accepted: of a mixed round's those that others had proposed as well. Where nothing was
    verified of what was proposed, both are of the candidates for the next token.
    n_tokens: tokens the round added to answers.
    n_experts: that the pass touched, of all layers; 0: none, or nobody counted them.
    Seconds: choose_s, the decision what to draft, where one was made; draft_s, candidates and their
    choice; pass_s, the target's pass with what surrounds it; sample_s.
    """

    position: int
    n_sequences: int = 1
    n_undrafted: int = 0
    is_timing_shared: bool = False
    n_positions: int = 0
    n_draft_rows_saved: int = 0
    is_top1: bool = False
    has_both_kinds: bool = False
    n_drafted: int = 0
    is_tree: bool = False
    n_expected: float = 0.0
    n_accepted: int = 0
    n_lookup_accepted: int = 0
    n_tokens: int = 0
    n_experts: int = 0
    choose_s: float = 0.0
    draft_s: float = 0.0
    pass_s: float = 0.0
    sample_s: float = 0.0
    n_rounds: int = 1

    def add_plain(self, other: Round) -> None:
        """Takes up another plain round."""
        self.n_rounds += other.n_rounds
        self.n_tokens += other.n_tokens
        self.pass_s += other.pass_s
        self.sample_s += other.sample_s

    def add_tree(self, tree: Tree) -> None:
        """Adds what the target is given of one sequence."""
        self.n_drafted += tree.n_drafted
        self.is_tree |= not tree.is_chain
        self.n_expected += tree.n_expected

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
    def n_draft_rows(self) -> int:
        """Rows of the drafter's pass: of each sequence the last token and the places after it."""
        return self.n_asked * (self.n_positions + 1) - self.n_draft_rows_saved

    @property
    def kind(self) -> str:
        """What was verified: "none", "chain" or "tree"."""
        return "tree" if self.is_tree else "chain" if self.n_drafted else "none"

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.choose_s + self.draft_s + self.pass_s + self.sample_s


Buckets = dict[int, RunningMedian]
"""Times of passes of as many rows, by the tokens in the caches."""


class CostModel:
    """Seconds of passes by rows and the tokens in the caches: plain ones, chains, trees and drafts.

    Rows of several sequences take longer than as many of one, which is known from plain passes, a
    row for each; more rows are taken to cost what they cost one sequence. Of verified passes of
    several it is kept what they took beyond that, which holds for other sizes and numbers of
    sequences until these are measured. n_observed: rounds filed by this process. version: how often
    what is told has changed by more than a little.
    """

    def __init__(self, n_first: int = 1) -> None:
        """n_first: runs of a shape that are slower than those to come."""
        self.n_first = n_first
        self.n_observed = self.version = 0
        self.first_s = 0.0
        """What the first pass of a size took beyond the second, lately."""
        self._times: dict[str, dict[int, Buckets]] = {
            kind: {} for kind in (*PASSES, "brief", "ranked")
        }
        self._multi_sequence_residual: dict[
            tuple[int, bool], dict[int, RunningMedian]
        ] = {}  # by sequences, trees; nodes
        self.sample, self.ask = RunningMedian(), RunningMedian()
        """Seconds of choosing one token, and of taking up candidates that took no draft."""
        self.experts = ExpertCosts()
        # What follows from the times, as it is asked for more often than they change.
        self._warm: dict[str, set[int]] = {kind: set() for kind in self._times}
        self.most_rows = 0
        """Rows of the largest pass that was run more than once."""
        self._lines: dict[str, dict[int, Interpolator]] = {kind: {} for kind in self._times}

    @property
    def knows_plain(self) -> bool:
        """Whether plain rounds of answers were measured more than once."""
        return bool(self._warm["plain"])

    @property
    def knows_trees(self) -> bool:
        """Whether any were run; they are taken to cost what chains do until then."""
        return bool(self._times["trees"]) or any(
            is_tree for _, is_tree in self._multi_sequence_residual
        )

    def knows_plain_of(self, n_sequences: int) -> bool:
        """Whether such rounds were of as many sequences, or of less than twice as many."""
        known = self._warm["plain"]
        return n_sequences in known or any(n_sequences < n < 2 * n_sequences for n in known)

    def mark_stale(self, *kinds: str) -> None:
        """Lets coming times replace the measured times of some kinds."""
        for kind in kinds:
            for buckets in self._times[kind].values():
                for median in buckets.values():
                    median.mark_stale()

    def end_warm_up(self) -> None:
        """Lets times of answers replace all measured times."""
        self.mark_stale(*self._times)
        self._warm["plain"].clear()  # with which drafting is compared
        self.experts.mark_stale()
        self.sample, self.ask = RunningMedian(), RunningMedian()

    def most_draft_rows(self, is_top1: bool) -> int:
        """Rows of the largest draft of a kind that was run more than once."""
        return max(self._warm["brief" if is_top1 else "ranked"], default=0)

    def is_warm(self, done: Round) -> bool:
        """Whether rounds like this one have been through their first run."""
        is_known = self.knows_pass(done.n_rows, done.is_tree, done.n_sequences)
        return is_known and self._is_drafted(done)

    def _is_drafted(self, done: Round) -> bool:
        """Whether its draft, if it has one, was run more than once."""
        drafts = self._warm["brief" if done.is_top1 else "ranked"]
        return not done.n_positions or done.n_draft_rows in drafts

    def is_settled(self, done: Round) -> bool:
        """Whether such rounds were filed so often that one time more changes little."""
        if not self._is_drafted(done):
            return False
        if done.n_drafted and done.n_sequences > 1:
            known = self._multi_sequence_residual.get((done.n_sequences, done.is_tree), {})
            median = known.get(done.n_drafted)
        else:
            median = self._times[_kind(done)].get(done.n_rows, {}).get(_bucket(done.position))
        return median is not None and median.is_full

    def knows_pass(self, n_rows: int, is_tree: bool = False, n_sequences: int = 1) -> bool:
        """Whether such passes were run more than once."""
        warm = self._warm
        if n_rows > n_sequences > 1:
            median = self._multi_sequence_residual.get((n_sequences, is_tree), {}).get(
                n_rows - n_sequences
            )
            return median is not None and median.is_warm
        if is_tree:
            return n_rows in warm["trees"]
        return n_rows in warm["chains"] or n_rows in warm["plain"]

    def observe(self, done: Round, *, with_draft: bool = True) -> None:
        """Files a round's times. with_draft: whether its draft was one like others."""
        self.n_observed += 1
        pass_s, bucket = done.pass_s / done.n_rounds, _bucket(done.position)
        if done.n_drafted and done.n_sequences > 1:
            self._observe_residual(done, pass_s)
        else:
            median = self._median(_kind(done), done.n_rows, bucket)
            first_s = median.value if not median.is_warm else 0.0
            if done.n_experts:
                self.experts.observe(done.n_rows, done.n_experts, pass_s, median)
                self._forget_lines(*PASSES)
            self._file(_kind(done), done.n_rows, bucket, pass_s, done.n_experts)
            if first_s > 0.0 and median.is_warm:
                self.first_s += (max(first_s - pass_s, 0.0) - self.first_s) / 2.0
        if done.n_positions and with_draft:
            self._file("brief" if done.is_top1 else "ranked", done.n_draft_rows, 0, done.draft_s)
        if done.n_drafted and not done.n_positions:
            self.ask.add(done.draft_s)
        self.sample.add(done.sample_s / max(done.n_tokens, 1))

    def draft_s(self, n_rows: int, is_top1: bool) -> float:
        """Drafts of so many rows; of a kind that was never run, as of the other."""
        kinds = ("brief", "ranked") if is_top1 else ("ranked", "brief")
        kind = next((kind for kind in kinds if self._times[kind]), kinds[0])
        return self._line(kind, 0).at(n_rows)

    def pass_s(
        self, position: int, n_rows: int, is_tree: bool = False, n_sequences: int = 1
    ) -> float:
        """A pass of so many rows after `position` tokens; a plain one must have been measured."""
        return self.passes_s(position, (n_rows,), is_tree, n_sequences)[0]

    def passes_s(
        self, position: int, counts: Sequence[int], is_tree: bool = False, n_sequences: int = 1
    ) -> list[float]:
        """Such passes of several numbers of rows.

        What is not known of a tree is a chain's cost, times what the nearest tree costs more.
        """
        bucket = _bucket(position)
        found = self._alone_s(bucket, counts, is_tree)
        if n_sequences > 1 and self.knows_plain_of(n_sequences):
            apart_s = self._line("plain", bucket).at(n_sequences)
            apart_s -= self._line("chains", bucket).at(n_sequences)
            beyond = self._multi_sequence_residual_s(
                n_sequences, is_tree, [n - n_sequences for n in counts]
            )
            found = [max(s + apart_s + more, 0.0) for s, more in zip(found, beyond, strict=True)]
        return found

    def _alone_s(self, bucket: int, counts: Sequence[int], is_tree: bool) -> list[float]:
        """Passes of one sequence."""
        chains = self._line("chains", bucket)
        if not is_tree or not self._times["trees"]:
            return [chains.at(n) for n in counts]
        trees = self._line("trees", bucket)
        found = []
        for n in counts:
            rows = trees.nearest(n)
            more = 1.0 if rows == n else chains.at(n) / max(chains.at(rows), 1e-9)
            found.append(trees.at(rows) * more)
        return found

    def _multi_sequence_residual_s(
        self, n_sequences: int, is_tree: bool, counts: Sequence[int]
    ) -> Sequence[float]:
        """What verifying so many nodes of several sequences takes beyond what one's passes tell.

        What was measured; else on lines between sizes that were often enough for no single time to
        count, of the nearest number of sequences for which there are some.
        """
        if not any(counts):  # plain rounds, which are asked for often
            return [0.0] * len(counts)
        sure = {
            key: [(n, median.value) for n, median in sorted(known.items()) if median.is_sure]
            for key, known in self._multi_sequence_residual.items()
            if is_tree or not key[1]
        }
        nearest = min(
            (key for key in sure if sure[key]),
            key=lambda key: (key[1] != is_tree, abs(key[0] - n_sequences)),
            default=None,
        )
        found = {0: 0.0}
        if nearest is not None:
            sizes, seconds = zip(*sure[nearest], strict=True)
            between = np.interp(counts, sizes, seconds)
            found = {n: float(s) for n, s in zip(counts, between, strict=True)} | found
        own = self._multi_sequence_residual.get((n_sequences, is_tree), {})
        found |= {n: median.value for n, median in own.items() if median.is_warm}
        return [found.get(n, 0.0) for n in counts]

    def _observe_residual(self, done: Round, pass_s: float) -> None:
        n, position = done.n_sequences, done.position
        told_s = self._alone_s(_bucket(position), (done.n_rows,), done.is_tree)[0]
        told_s += self.pass_s(position, n, n_sequences=n) - self.pass_s(position, n)
        known = self._multi_sequence_residual.setdefault((n, done.is_tree), {})
        median = known.setdefault(done.n_drafted, RunningMedian(self.n_first))
        before = median.value, median.is_warm, median.is_sure
        median.add(pass_s - told_s)
        is_little = abs(median.value - before[0]) <= SIGNIFICANT_CHANGE * told_s
        self.version += not is_little or (median.is_warm, median.is_sure) != before[1:]
        if median.is_warm:
            self.most_rows = max(self.most_rows, done.n_rows)
        if done.n_experts:
            self.experts.observe(done.n_rows, done.n_experts, pass_s, median)
            self._forget_lines(*PASSES)

    def expected(self, done: Round) -> Round:
        """The round as it is expected to be where its pass does nothing else."""
        pass_s = self.pass_s(done.position, done.n_rows, done.is_tree, done.n_sequences)
        return replace(
            done,
            draft_s=self.draft_s(done.n_draft_rows, done.is_top1) if done.n_positions else 0.0,
            pass_s=done.n_rounds * pass_s,
            sample_s=done.n_tokens * self.sample.value,
        )

    def plain_s(self, position: int, n_sequences: int = 1) -> float:
        """A plain round."""
        pass_s = self._line("plain", _bucket(position)).at(n_sequences)
        return pass_s + n_sequences * self.sample.value

    def _line(self, kind: str, bucket: int) -> Interpolator:
        """Seconds by rows.

        A row count that was not run in this bucket takes the nearest one's, and what a plain pass
        costs more here than there.
        """
        line = self._lines[kind].get(bucket)
        if line is None:
            plain = self._times["plain"].get(1, {})
            here = _nearest(plain, bucket)[1].value if plain else 0.0
            times = self._times[kind]
            if kind == "chains":  # as far as they go; beyond, plain rounds are all that is known
                most = max(times, default=1)
                known = self._times["plain"].items()
                times = {**times, **{n: of for n, of in known if n == 1 or n > most}}
            points = []
            for rows, buckets in times.items():
                at, median = _nearest(buckets, bucket)
                more = here - _nearest(plain, at)[1].value if plain and at != bucket else 0.0
                more = more if abs(more) > NOISE * here and kind in PASSES else 0.0
                more += self.experts.more_s(median, rows)
                points.append((rows, max(median.value + more, 0.0), median.is_warm))
            line = self._lines[kind][bucket] = Interpolator(points)
        return line

    def _median(self, kind: str, n_rows: int, bucket: int) -> RunningMedian:
        buckets = self._times[kind].setdefault(n_rows, {})
        return buckets.setdefault(bucket, RunningMedian(self.n_first))

    def _file(
        self, kind: str, n_rows: int, bucket: int, seconds: float, n_experts: float = 0.0
    ) -> None:
        median = self._median(kind, n_rows, bucket)
        before = median.value, median.is_warm
        median.add(seconds, n_experts)
        if (median.value, median.is_warm) != before:
            # What plain rounds take tells how much longer others take in other contexts.
            self._forget_lines(*(PASSES if kind == "plain" else (kind,)))
            is_little = abs(median.value - before[0]) <= SIGNIFICANT_CHANGE * before[0]
            self.version += not is_little or median.is_warm != before[1]
        if median.is_warm:
            self._mark_warm(kind, n_rows)

    def _forget_lines(self, *kinds: str) -> None:
        for kind in kinds:
            self._lines[kind].clear()

    def _mark_warm(self, kind: str, n_rows: int) -> None:
        self._warm[kind].add(n_rows)
        if kind in PASSES:
            self.most_rows = max(self.most_rows, n_rows)

    def to_dict(self) -> dict[str, Any]:
        """All medians that are more than a first time, as plain values."""
        found: dict[str, Any] = {
            kind: [
                [rows, bucket, median.value, median.n_experts]
                for rows, buckets in sorted(known.items())
                for bucket, median in sorted(buckets.items())
                if median.is_warm
            ]
            for kind, known in self._times.items()
        }
        found["beyond"] = [
            [n_sequences, is_tree, n, median.value]
            for (n_sequences, is_tree), known in sorted(self._multi_sequence_residual.items())
            for n, median in sorted(known.items())
            if median.is_warm
        ]
        found |= {"sample": self.sample.value, "ask": self.ask.value}
        return found | {"experts": self.experts.to_list()}

    @classmethod
    def from_dict(cls, stored: dict[str, Any], n_first: int = 1) -> CostModel:
        """What `to_dict` gave; KeyError, ValueError or TypeError for anything else."""
        costs = cls(n_first)
        for kind, known in costs._times.items():
            for rows, bucket, *measured in stored[kind]:
                known.setdefault(_count(rows), {})[int(bucket)] = RunningMedian.known(*measured)
                costs._mark_warm(kind, int(rows))
        for n_sequences, is_tree, n, seconds in stored["beyond"]:
            beyond = costs._multi_sequence_residual.setdefault(
                (_count(n_sequences), bool(is_tree)), {}
            )
            beyond[_count(n)] = RunningMedian.known(seconds, least=-1e6)
            costs.most_rows = max(costs.most_rows, n_sequences + n)
        costs.sample = RunningMedian.known(stored["sample"])
        costs.ask = RunningMedian.known(stored["ask"])
        costs.experts = ExpertCosts.from_list(stored["experts"])
        return costs


def _kind(done: Round) -> str:
    return "trees" if done.is_tree else "chains" if done.n_drafted else "plain"


def _count(value: Any) -> int:
    return integer("a count", value, 1, 1 << 16)


def _bucket(position: int) -> int:
    return (position // CELLS).bit_length()


def _nearest(buckets: Buckets, bucket: int) -> tuple[int, RunningMedian]:
    """The median of the bucket, or of the nearest; warm ones first."""
    here = buckets.get(bucket)
    if here is not None and here.is_warm:
        return bucket, here
    return min(buckets.items(), key=lambda item: (not item[1].is_warm, abs(item[0] - bucket)))
