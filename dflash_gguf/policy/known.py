"""What was learned about drafting with a pair on this machine, and how it is kept.

What drafts promise and how far they kept it, what drafting has lost, and a file of it all between
processes, so that no answer begins cold.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import machine_cache
from ..convert.schema import SPLIT_ENDING
from ..draft.marginals import Candidates, grow
from ..draft.tree import Tree
from .costs import Costs, Median, Round

Floats = NDArray[np.float64]

SHARE = 0.01
"""Share of the running time that drafting may lose, and that deciding may take."""
AHEAD, SAVED = 64, 8.0
"""Plain rounds whose share may be lost at once, and how many times that can be saved."""
SUSPENDED = 4.0
"""Times what a round is expected to take, beyond which the process or the machine stood still. Such
a time is nobody's debt: it would take a hundred times as long to earn."""
TRUSTED = 4.0
"""Tokens that copies may promise before it is seen what their promises are worth."""
MOST_KEPT = 256
"""Rounds after which a decision is made anew at the latest."""
MEMORY = 16
"""Drafts, or rounds, after which an outcome weighs 1/e in expectations."""
N_HEADER = 1 << 16
"""Bytes at a file's start that tell it from another of the same size and time."""
N_PLAIN = 3
"""Plain rounds that are measured while a model is loaded; of others one."""


class Known:
    """What was learned about drafting with one engine on one machine. It outlives answers."""

    def __init__(self, costs: Costs | None = None) -> None:
        """costs: what was measured before, if anything was."""
        self.costs = costs or Costs()
        self.promise = Promise()
        self.choose_s = 0.0
        self.host = Median()
        self._paid, self._free = Account(), Account(TRUSTED)
        self._since_draft = self._since_plain = 0
        self._was_drafted = False
        self._tokens = self._seconds = 0.0
        self._n_seen = 0
        self._n_vain = 0

    @property
    def n_kept(self) -> int:
        """Rounds that a decision is kept for, so that making it is a small part of them."""
        plain_s = self.costs.plain_s(0) if self.costs.knows_plain else 0.0
        return math.ceil(min(max(self.choose_s / max(SHARE * plain_s, 1e-9), 1.0), MOST_KEPT))

    @property
    def rate(self) -> float:
        """Tokens a second of the last rounds, 0 before any."""
        return self._tokens / self._seconds if self._seconds > 0.0 else 0.0

    @property
    def share(self) -> float:
        """Of the time that may be lost: less where nothing has been accepted for long."""
        return SHARE if self._n_vain < MEMORY // 2 else SHARE / 4.0

    def may_lose(self, seconds: float, plain_s: float, *, is_paid: bool = True) -> bool:
        """Whether so much more may be lost now, by drafts that cost a pass or by others.

        Less than 0: what is promised. plain_s: of a token of plain decoding.
        """
        return (self._paid if is_paid else self._free).may_lose(seconds, plain_s)

    def rounds_to_wait(self, seconds: float, plain_s: float) -> int:
        """Plain rounds until drafts may lose so much, or until it is worth to think again."""
        n = self._paid.missing_s(seconds, plain_s) / max(self.share * plain_s, 1e-12)
        return int(min(max(n, self.n_kept), MOST_KEPT))

    def needs_plain(self, advantage: float) -> bool:
        """Whether a plain round is due, so that the cost that drafting is compared with is recent.

        It takes two: one straight after a drafted round is slower than those of plain decoding.
        advantage: tokens that each gives up.
        """
        return self._since_plain * SHARE >= 2.0 * advantage

    def observe(self, done: Round, promised_s: float = 0.0) -> None:
        """Learns from a round. promised_s: seconds that its draft was to gain."""
        costs, is_plain = self.costs, done.n_drafted == 0 and done.n_positions == 0
        knows_plain, seconds = costs.knows_plain_of(done.n_sequences), done.seconds
        keep = (1.0 - 1.0 / MEMORY) ** done.n_rounds
        self._tokens = keep * self._tokens + done.n_tokens
        self._seconds = keep * self._seconds + seconds
        if done.choose_s > 0.0:
            self.choose_s += (done.choose_s - self.choose_s) / min(4.0, 1.0 + costs.n_observed)
        self._paid.earn(self.share * seconds)
        self._free.earn(SHARE * seconds)
        self._n_seen += done.n_rounds
        plain_s = 0.0
        if knows_plain:
            plain_s = costs.plain_s(done.position, done.n_sequences) / done.n_sequences
            if not is_plain:
                self._account(done, promised_s, plain_s)
        self._paid.end_round(plain_s)
        self._free.end_round(plain_s)
        if done.n_drafted and done.n_positions:
            self._n_vain = 0 if done.n_accepted else self._n_vain + 1
        is_cold = is_plain and self._was_drafted and knows_plain
        # Filing a round takes a while too; of those that are well known some are enough.
        if not is_cold and (
            done.n_rounds > 1 or self._n_seen % self.n_kept == 0 or not costs.is_settled(done)
        ):
            # After a pause a draft also takes up all rows that were decoded meanwhile.
            is_usual = self._since_draft < MEMORY or not costs.most_positions(done.is_brief)
            costs.observe(done, with_draft=is_usual)
        self._since_plain = 0 if is_plain and not is_cold else self._since_plain + 1
        self._was_drafted = not is_plain
        self._since_draft = 0 if done.n_positions else self._since_draft + done.n_rounds

    def _account(self, done: Round, promised_s: float, plain_s: float) -> None:
        """Books what a round has lost, less than 0 if it has won. plain_s: of a token."""
        seconds = done.seconds
        is_usual = self.costs.is_warm(done)
        if not is_usual and (self.promise.is_proven or not done.n_positions):
            seconds = min(seconds, self.costs.round_s(done))  # a graph is built only once
        elif seconds > SUSPENDED * plain_s:
            seconds = min(seconds, SUSPENDED * self.costs.round_s(done))
        if done.is_mixed:  # what others proposed as well would have come without the draft
            lost_s = min(done.draft_s, seconds) - (done.n_accepted - done.n_copied) * plain_s
        else:
            lost_s = seconds - done.n_tokens * plain_s
        (self._paid if done.n_positions else self._free).book(lost_s, promised_s)


class Account:
    """What drafting has lost beyond plain decoding, and what its promises were worth."""

    MEMORY = 32
    """Promises after which one weighs 1/e."""

    def __init__(self, trusted: float = 0.0) -> None:
        """trusted: tokens of plain decoding, promises of which count as kept beforehand."""
        self._trusted = trusted
        self._lost_s = 0.0
        self._promised_s = self._gained_s = 0.0

    def may_lose(self, seconds: float, plain_s: float) -> bool:
        """Whether so much more may be lost now. Less than 0: what is promised.

        What was lost before is then made up for in AHEAD rounds, as far as such promises were kept.
        """
        return self.missing_s(seconds, plain_s) <= 0.0

    def missing_s(self, seconds: float, plain_s: float) -> float:
        """What must be earned before that."""
        if seconds < 0.0:
            known_s = self._trusted * plain_s
            promised_s, gained_s = self._promised_s + known_s, self._gained_s + known_s
            kept = min(max(gained_s / promised_s, 0.0), 1.0) if promised_s > 0.0 else 0.0
            seconds *= AHEAD * kept
        return self._lost_s + seconds - SHARE * AHEAD * plain_s

    def earn(self, seconds: float) -> None:
        """Time goes by, some of which may be lost."""
        self._lost_s -= seconds

    def book(self, lost_s: float, promised_s: float) -> None:
        """What a round has lost that promised to gain something, or nothing."""
        self._lost_s += lost_s
        if promised_s > 0.0:
            keep = 1.0 - 1.0 / self.MEMORY
            self._promised_s = keep * self._promised_s + promised_s
            self._gained_s = keep * self._gained_s - lost_s

    def end_round(self, plain_s: float) -> None:
        """No more can be saved than so much."""
        self._lost_s = max(self._lost_s, -SAVED * SHARE * AHEAD * plain_s)


class Promise:
    """What drafts with ranked candidates promised lately, and how far such promises were kept."""

    TRUST_MEMORY, TRUST_WEIGHT = 32, 2.0
    """Rounds after which an outcome weighs 1/e in the trust in expectations; and the accepted
    candidates that the trust begins with: so many missing ones halve it."""

    def __init__(self) -> None:
        self._tables: dict[tuple[int, ...], tuple[Floats, int]] = {}
        self._expected = self._accepted = self.TRUST_WEIGHT

    @property
    def trust(self) -> float:
        """Accepted candidates for every one that was expected."""
        return self._accepted / self._expected

    @property
    def is_proven(self) -> bool:
        """Whether some candidates were accepted lately."""
        return self._accepted >= 2.0 * self.TRUST_WEIGHT

    def table(
        self, outlook: Sequence[float], lengths: Sequence[int], sizes: Sequence[int]
    ) -> Floats:
        """Tokens beyond the first of chains and trees, float64 [2, length, size].

        outlook: chances of the paths of brief chains, which are no better than ranked ones. Before
        a tree was drafted, what is beside its chain is taken to follow from how sure that is.
        """
        path = np.array(outlook[: lengths[-1]])
        floor = _gains(path, None, lengths, sizes)
        found, _ = self._tables.get((*lengths, 0, *sizes), (None, 0))
        if found is None:
            steps = np.sort(path / np.concatenate([[1.0], path[:-1]]))
            sureness = min(int(20.0 * float(steps[len(steps) // 2])), 19)
            floor[1] += _beside(sureness, tuple(lengths), tuple(sizes))
            return floor
        return np.maximum(floor, self.trust * found)

    def add(self, tree: Tree, n: int, lengths: Sequence[int], sizes: Sequence[int]) -> None:
        """Takes up a draft of n positions. tree: its likeliest nodes."""
        key = (*lengths, 0, *sizes)
        table, n_seen = self._tables.get(key, (np.zeros(()), 0))
        spine = list(map(math.exp, tree.spine().log_chances[1:])) or [0.0]
        last = spine[-1] / spine[-2] if len(spine) > 1 else spine[-1]
        # What was not drafted, or was too unlikely to be among the nodes, goes on in like manner.
        last = last if len(spine) >= n else 0.0
        while len(spine) < lengths[-1]:
            spine.append(spine[-1] * last)
        n_seen = min(n_seen + 1, MEMORY)
        gains = _gains(np.array(spine), tree, lengths, sizes)
        self._tables[key] = table + (gains - table) / n_seen, n_seen

    def to_dict(self) -> dict[str, float]:
        """How far promises were kept."""
        return {"expected": self._expected, "accepted": self._accepted}

    def learn(self, stored: Mapping[str, Any]) -> None:
        """Takes up what `to_dict` gave; KeyError, TypeError or ValueError for anything else."""
        expected, accepted = float(stored["expected"]), float(stored["accepted"])
        if not (0.0 < expected < 1e6 and 0.0 < accepted < 1e6):
            raise ValueError(f"{accepted} accepted of {expected}")
        self._expected, self._accepted = expected, accepted

    def observe(self, done: Round) -> None:
        """Compares what was expected of a round with what came."""
        keep = 1.0 - 1.0 / self.TRUST_MEMORY
        prior = (1.0 - keep) * self.TRUST_WEIGHT
        self._expected = keep * self._expected + prior + done.n_expected
        self._accepted = keep * self._accepted + prior + done.n_accepted


def _gains(
    spine: Floats, tree: Tree | None, lengths: Sequence[int], sizes: Sequence[int]
) -> Floats:
    """Tokens beyond the first that one draft promises, [2, length, size]."""
    chain = np.concatenate([[0.0], np.cumsum(spine)])
    nodes = np.minimum(np.array(lengths)[:, None], np.array(sizes)[None, :])
    table = np.stack([chain[nodes]] * 2)
    if tree is not None and tree.n_drafted:
        depths, chances = np.array(tree.depths[1:]), np.exp(tree.log_chances[1:])
        for row, length in enumerate(lengths):
            found = np.cumsum(chances[depths <= length])
            table[1, row] = np.maximum(
                table[1, row], found[np.minimum(sizes, len(found)) - 1] if len(found) else 0.0
            )
    return table


@cache
def _beside(sureness: int, lengths: tuple[int, ...], sizes: tuple[int, ...]) -> Floats:
    """What a tree promises beyond its chain, [length, size], before one was drafted.

    sureness: of the best candidates, in twentieths. Others are taken to have half the chance of
    the one before each.
    """
    best = sureness / 20.0
    chances = np.array([best, *(1.0 - best) * 0.5 ** np.arange(1, 8)])
    steps = np.log(np.maximum(np.tile(chances, (lengths[-1], 1)), 1e-9))
    tokens = np.tile(np.arange(len(chances)), (lengths[-1], 1))
    tree = grow(0, Candidates(tokens, steps), sizes[-1])
    chains, trees = _gains(np.exp(np.cumsum(steps[:, 0])), tree, lengths, sizes)
    found: Floats = trees - chains
    return found


def measure(
    known: Known,
    n_rows: int,
    longest: int,
    run: Callable[[Round], None],
    most_s: float,
    run_alike: Callable[[Round], None] | None = None,
) -> None:
    """Runs some rounds that accept nothing, so that the first answers do not begin with guesses.

    Passes of up to n_rows and drafts of up to `longest` positions, as long as the next ones are
    likely to end before most_s have gone by. run: fills in what a round took. run_alike: one of
    rows that are alike, which touch few experts.
    """
    costs, spent_s, plain_s = known.costs, 0.0, 0.0
    shapes = [(0, True), (7, True), (3, True), (7, False), (1, True), (3, False), (15, True)]
    shapes += [(8, True), (16, True)]  # kernels begin another part of their rows there
    for n, is_brief in shapes:
        # A pass of many rows may take as long as several plain ones.
        likely_s = (costs.n_first + 1) * plain_s * (1.0 + n / 4.0)
        if n >= n_rows or (not is_brief and n > longest) or spent_s + likely_s > most_s:
            continue
        runs = [run] * (costs.n_first + (1 if n else N_PLAIN))
        if n and run_alike and costs.experts.are_there and not costs.experts.are_costed:
            runs.append(run_alike)
        for fill in runs:
            done = Round(0, n_positions=min(n, longest), is_brief=is_brief, n_drafted=n, n_tokens=1)
            done.is_tree = not is_brief
            fill(done)
            costs.observe(done)
            spent_s += done.seconds
        plain_s = plain_s or costs.plain_s(0)
    costs.are_guesses()


class CostFile:
    """Where that of one pair is kept: by its files, the device, its threads, and settings."""

    def __init__(self, paths: Sequence[str], *settings: str | int) -> None:
        """paths: target and drafter. settings: whatever else changes what a pass costs.

        Errors: OSError for a file that cannot be read.
        """
        files = [_file_identity(part) for path in paths for part in files_of(path)]
        self._identity = [*files, *map(str, settings), machine_cache.cpu_name()]
        name = hashlib.sha256("\n".join(self._identity).encode()).hexdigest()[:16]
        self._name = f"costs-{name}.json"

    def load(self, n_first: int = 1) -> tuple[Costs, dict[str, Any]]:
        """What was measured before, and what proposers have learned, by their names.

        Empty if nothing was, or if it makes no sense. n_first: as of `Costs`.
        """
        stored = machine_cache.read(self._name, self._identity)
        if stored is not None:
            with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
                return Costs.from_dict(stored["costs"], n_first), dict(stored["learned"])
        return Costs(n_first), {}

    def store(self, costs: Costs, learned: Mapping[str, Any]) -> None:
        """Keeps both."""
        value = {"costs": costs.to_dict(), "learned": dict(learned)}
        machine_cache.write(self._name, self._identity, value)


def files_of(path: str) -> list[str]:
    """The files of a model: this one, and those that follow it if it is the first of several."""
    found = re.search(r"-00001-of-(\d{5})\.gguf$", path)
    if found is None:
        return [path]
    prefix, n = path[: found.start()], int(found[1])
    others = (prefix + SPLIT_ENDING % (i, n) for i in range(2, n + 1))
    return [path, *itertools.takewhile(os.path.exists, others)]


def _file_identity(path: str) -> str:
    stat = os.stat(path)
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read(N_HEADER)).hexdigest()
    return f"{os.path.abspath(path)} {stat.st_size} {stat.st_mtime_ns} {digest}"
