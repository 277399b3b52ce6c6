"""What a round drafts and verifies: as one was told, or (`auto`) what pays for itself.

`auto` counts everything in tokens. The rate is that of the best way to decode found so far, plain
decoding at least, and what takes s seconds is worth it if it brings more than rate * s tokens: this
is what makes all rounds together fastest (Dinkelbach's method). So

    before the draft    of plain decoding and drafts of several lengths, whichever promises the most
                        tokens a second, by how often such candidates were taken lately
    after it            nodes of whatever was proposed for all sequences, the likeliest first, as
                        many as bring more than the rows of the pass they are in cost

The first choice is kept for some rounds, as making it takes time. Costs are those that were
measured; they have steps (kernels change at 4, 8 or 16 rows), so every size of a ladder is
compared, not only the next one. And since all of this may be wrong, accounts are kept of what
drafts and copies have really cost beyond plain decoding: who has lost a hundredth of the time rests
until a look is affordable again, or until what is promised repays it. Nothing here reads a clock:
equal rounds give equal choices.

The idea of letting the measured cost of the next node decide: CaDDTree, arXiv 2606.01813.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..native import NO_THRESHOLD, BreakEven, select_nodes
from .controller_state import MEMORY, Known, ProposalBackoff
from .cost_model import Round
from .prices import Prices
from .proposers.proposer import CHAIN, TOP1, TREE, Proposer, SpeculativeState
from .tree import Tree

DOUBTED = 0.8
"""Copies are taken by their chances unless fewer of those that were expected came true lately."""
SIZES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127, 191, 255)
"""Positions and nodes that are tried. Their verify has 2, 3, 4, 6, 8, 12, 16 ... rows: kernels
change at multiples of 4 and 8 rows, and every other size would need graphs and measurements."""


@dataclass(frozen=True, slots=True)
class Way:
    """A draft that costs a pass: positions, and one of the shapes of proposals."""

    n_positions: int
    shape: str


class Controller:
    """Chooses twice a round: before the draft how long it is, after it what is verified.

    n_nodes: that it would verify of one sequence now, at most. longest: positions of a proposal at
    most.
    """

    n_nodes: int
    longest: int

    def break_even(self, done: Round) -> BreakEven:  # noqa: ARG002
        """What is proposed must promise, by those whom it costs no pass."""
        return NO_THRESHOLD

    def is_due(self, done: Round) -> bool:  # noqa: ARG002
        """Whether the choice for this round takes time."""
        return False

    def choose(
        self, done: Round, requests: Sequence[SpeculativeState], paid: Proposer | None
    ) -> Way | None:
        """What a proposer that costs a pass is asked for, if there is one; None: nothing.

        The others have proposed already.
        """
        raise NotImplementedError

    def select_nodes(self, done: Round, trees: Sequence[Tree], limits: Sequence[int]) -> list[Tree]:
        """What is verified of each tree: so many nodes below the root at most, or none.

        trees: of those for whom anything is proposed.
        """
        raise NotImplementedError

    def observe(self, done: Round) -> None:
        """Learns from a round, if it learns."""

    def keeps_plain(self, done: Round, n_plain: int) -> bool:  # noqa: ARG002
        """Whether it would decode plainly now where nothing is proposed.

        n_plain: rounds of which it has not heard yet.
        """
        return False

    def pause(self, done: Round, host_s: float) -> int:  # noqa: ARG002
        """Plain rounds in which nobody need be asked, after one in which asking took so long.

        0: it was not measured by itself.
        """
        return 0


class FixedController(Controller):
    """The same size every round, less only where the answer or the context ends."""

    def __init__(self, shape: str, size: int, longest: int, least: int = 0) -> None:
        """shape: CHAIN, TREE or MAIN_CHAIN. size: nodes. longest: positions.

        least: nodes; fewer are dropped.
        """
        self._way = Way(min(size, longest), shape)
        self.longest, self.n_nodes, self._least = self._way.n_positions, size, least

    def choose(
        self,
        done: Round,  # noqa: ARG002
        requests: Sequence[SpeculativeState],
        paid: Proposer | None,  # noqa: ARG002
    ) -> Way | None:
        """Always the same."""
        limit = max(request.limit for request in requests)
        return self._way if min(limit, self._way.n_positions) >= self._least else None

    def select_nodes(self, done: Round, trees: Sequence[Tree], limits: Sequence[int]) -> list[Tree]:  # noqa: ARG002
        """The likeliest chain, or the likeliest nodes."""
        is_chain = self._way.shape == CHAIN
        found = [
            (tree.main_chain() if is_chain else tree).first(min(self.n_nodes, limit))
            for tree, limit in zip(trees, limits, strict=True)
        ]
        return [tree if tree.n_drafted >= self._least else tree.first(0) for tree in found]


@dataclass(slots=True)
class Decision:
    """What is drafted for some rounds of as many sequences.

    ttl_rounds: rounds until it is made anew. way: None: nothing that costs a pass. is_look: whether
    that is to see what it brings. rate: tokens a second of the best way to decode; 0: not known
    yet. gain: tokens a round that the way wins over plain decoding.
    """

    ttl_rounds: int = 0
    way: Way | None = None
    is_look: bool = False
    rate: float = 0.0
    gain: float = 0.0


class AutoController(Controller):
    """What pays for itself, for the answers of one engine."""

    def __init__(
        self, known: Known, longest: int, most: int, least: int = 0, *, deepest: int = 0
    ) -> None:
        """longest: positions of a draft that costs a pass. most: nodes of a pass for each sequence.

        least: nodes; fewer are dropped. deepest: positions of other proposals, at least longest.
        """
        self._known, self._costs = known, known.costs
        self.longest = min(max(longest, deepest), most)
        longest = min(longest, most)
        self._lengths = ladder(SIZES, *(n for n in (longest, least) if 0 < n <= longest))
        self._sizes = ladder(SIZES, *(n for n in (most, least) if 0 < n <= most))
        self._least = max(least, 1)
        self._prices = Prices(known.costs, self._sizes, self._least)
        self._decisions: dict[tuple[int, int], Decision] = {}  # by how many decode and are asked
        self._decision = Decision()  # this round's
        self._to_compare = False  # whether this round is plain to see what one takes
        self._asked = NO_THRESHOLD  # what this round's copies were cut by
        self._backoff = ProposalBackoff(known)
        self.n_nodes = self._prices.most_nodes

    def start(self) -> None:
        """Another answer: what was decided in the one before is kept as long as it was to be.

        Not what was to be run only once more, which may have been for how little was left.
        """
        for decision in self._decisions.values():
            if decision.ttl_rounds == 1:
                decision.ttl_rounds = 0
        self._backoff.start()

    def _of(self, done: Round) -> Decision:
        """What was decided for rounds like this one; answers come and go, and come again."""
        return self._decisions.get((done.n_sequences, done.n_asked)) or Decision()

    # ---- before the draft

    def break_even(self, done: Round) -> BreakEven:
        """What a pass costs; beside the nodes of a draft others come cheaper."""
        decision = self._of(done)
        if decision.rate == 0.0 or decision.way is not None:
            self._asked = NO_THRESHOLD
        else:
            self._asked = self._prices.break_even(done, decision.rate)
            self.n_nodes = self._prices.most_nodes
        return self._asked

    def is_due(self, done: Round) -> bool:
        """Whether a decision is made now."""
        return self._of(done).ttl_rounds == 0

    def choose(
        self, done: Round, requests: Sequence[SpeculativeState], paid: Proposer | None
    ) -> Way | None:
        """The way that was decided on lately, or the best now; now and then a look."""
        limit = max(request.limit for request in requests)  # each has its own as well
        if self.is_due(done):
            self._decisions[done.n_sequences, done.n_asked] = self._decide(
                done, requests, limit, paid
            )
        self._decision, self._to_compare = self._of(done), False
        decision = self._decision
        way = decision.way
        if way is None or limit < self._least:
            return None
        if not decision.is_look:
            self._to_compare = self._known.needs_plain(decision.gain / done.n_sequences)
            if self._to_compare or self._copies_bring(decision.gain, done, requests):
                return None
        return way if way.n_positions <= limit else Way(limit, way.shape)

    def _copies_bring(self, gain: float, done: Round, requests: Sequence[SpeculativeState]) -> bool:
        """Whether what is at hand without a draft promises as much as one."""
        asked = [request for request in requests if request.proposed]
        trees = [request.merged() for request in asked]
        value, _ = self._best(done, trees, [request.n_room - 1 for request in asked])
        return value >= gain and self._may_verify(done, value)

    def _decide(
        self, done: Round, requests: Sequence[SpeculativeState], limit: int, paid: Proposer | None
    ) -> Decision:
        """Plain decoding or the best draft, and for how many rounds."""
        known, costs, n = self._known, self._costs, done.n_sequences
        self._prices.forget()
        self.n_nodes = self._prices.most_nodes
        if not costs.knows_plain_of(n):
            return Decision(1)
        plain_s = max(costs.plain_s(done.position, n), 1e-9)
        rate = max(n / plain_s, known.rate.of(n))
        plain = Decision(max(known.ttl_rounds, MEMORY), rate=rate)
        asked = [request for request in requests if paid and paid.name not in request.failed]
        if paid is None or not asked:
            return plain  # costs are all that can change
        expected_path_probs = np.mean(
            [paid.expected_path_probs(request.scorer) for request in asked], axis=0
        )
        tokens, seconds, way = self._best_way(done, expected_path_probs, limit)
        if way is None:
            return replace(plain, ttl_rounds=known.ttl_rounds)
        loss = seconds / plain_s - tokens / n  # plain rounds
        if not known.promise.is_proven:  # what is expected is no more than a guess
            loss = max(loss, seconds / plain_s - 1.0)
        if loss < 0.0 and known.paid.is_repaid_by(-loss):
            gain, rate = tokens * plain_s / seconds - n, max(tokens / seconds, rate)
            return Decision(known.ttl_rounds, way, rate=rate, gain=gain)
        if loss >= 0.0 and known.paid.may_lose(loss):
            return Decision(1, way, is_look=True, rate=rate)
        # Near an answer's end drafts are short; the next answer is to see to longer ones.
        rounds_until_affordable = (
            known.rounds_until_affordable(loss, n) if limit >= self._lengths[-1] else 0
        )
        return replace(plain, ttl_rounds=max(plain.ttl_rounds, rounds_until_affordable))

    def _best_way(
        self, done: Round, expected_path_probs: Sequence[float], limit: int
    ) -> tuple[float, float, Way | None]:
        """Tokens and seconds of the round with the draft that promises most tokens a second.

        expected_path_probs: chances of the paths of brief chains, which cost less than ranked ones
        and trees.
        """
        costs, n, n_asked = self._costs, done.n_sequences, done.n_asked
        if not self._lengths:
            return 0.0, 0.0, None
        # By kind: ranked chains, ranked trees, brief chains. By length, and then by nodes.
        drafts = np.full((3, len(self._lengths)), math.inf)
        first = bisect_left(self._lengths, self._least)
        for is_top1, kinds in ((False, [0, 1]), (True, [2])):
            # One length beyond those that were run: what is far is guessed.
            longest = costs.most_draft_rows(is_top1) // n_asked - 1
            n_known = max(bisect_right(self._lengths, longest), first)
            for at, length in enumerate(self._lengths[: n_known + 1]):
                if self._least <= length <= limit:
                    drafts[kinds, at] = costs.draft_s(n_asked * (length + 1), is_top1)
        chains, trees = self._prices.seconds(done, n_asked)
        passes = np.array([chains, trees, chains])
        tokens = n + n_asked * self._known.promise.table(
            expected_path_probs, self._lengths, self._sizes
        )
        seconds = drafts[:, :, None] + passes[:, None, :] + tokens * costs.sample.value
        rates = tokens / np.maximum(seconds, 1e-9)
        best = np.unravel_index(rates.argmax(), rates.shape)  # ranked ones first, if equal
        if rates[best] == 0.0:
            return 0.0, 0.0, None
        way = Way(self._lengths[best[1]], TOP1 if best[0] == 2 else TREE)
        return float(tokens[best]), max(float(seconds[best]), 1e-9), way

    # ---- after it

    def select_nodes(self, done: Round, trees: Sequence[Tree], limits: Sequence[int]) -> list[Tree]:
        """The nodes that are worth their rows; a look verifies some at least."""
        if done.n_positions and not done.is_top1 and not done.has_both_kinds:
            for tree in trees:
                self._known.promise.add(tree, done.n_positions, self._lengths, self._sizes)
        value, found = self._best(done, trees, limits)
        if done.n_positions:
            is_worth = value > 0.0 or self._decision.is_look
        else:
            is_worth = not self._to_compare and self._may_verify(done, value)
            if is_worth or (value > 0.0 and self._known.needs_plain(value / done.n_sequences)):
                self._backoff.pays(done, value / self._decision.rate)
        return found if found and is_worth else [tree.first(0) for tree in trees]

    def _may_verify(self, done: Round, value: float) -> bool:
        """Whether copies that bring so many tokens beyond their costs are verified now."""
        known, gain = self._known, value / done.n_sequences
        return value > 0.0 and not known.needs_plain(gain) and known.free.is_repaid_by(gain)

    def _best(
        self, done: Round, trees: Sequence[Tree], limits: Sequence[int]
    ) -> tuple[float, list[Tree]]:
        """Tokens beyond what their seconds are worth, and what is then verified of each tree.

        Nothing of none where nothing is worth it. All chains or all trees: some layers take longer
        for a tree, whatever its size.
        """
        if not trees or self._decision.rate == 0.0:
            return 0.0, []
        trust = 1.0 if done.n_positions else min(self._known.copied.value / DOUBTED, 1.0)
        break_even = self._prices.break_even(done, self._decision.rate)
        if (
            break_even is self._asked and trust == 1.0
        ):  # such trees are what `select_nodes` would find
            size = sum([tree.n_drafted for tree in trees])
            if size in self._sizes:
                prices = (
                    break_even.chains if all(tree.is_chain for tree in trees) else break_even.trees
                )
                value = sum([tree.n_expected for tree in trees]) - prices[self._sizes.index(size)]
                return value, list(trees)
        selection = select_nodes(
            [tree.parents for tree in trees],
            [tree.log_probs for tree in trees],
            limits,
            break_even,
            trust=trust,
            min_value=-math.inf if self._decision.is_look else 0.0,
        )
        if not any(selection.counts):
            return 0.0, []
        parts = trees if selection.is_tree else [tree.main_chain() for tree in trees]
        found = [part.first(n) for part, n in zip(parts, selection.counts, strict=True)]
        return selection.value, found

    # ---- after the round

    def observe(self, done: Round) -> None:
        """Passes the round on. What has just been run for the first time is run once more."""
        self._known.observe(done)
        decision = self._of(done)
        decision.ttl_rounds = max(decision.ttl_rounds - done.n_rounds, 0)
        if done.n_positions and not done.n_drafted:
            decision.ttl_rounds = 0  # what was decided has just failed
        may_repeat = not decision.is_look or self._known.paid.may_lose(0.0)
        if (
            done.n_positions
            and may_repeat
            and not (done.is_timing_shared or self._costs.is_warm(done))
        ):
            decision.ttl_rounds = max(decision.ttl_rounds, 1)

    def keeps_plain(self, done: Round, n_plain: int) -> bool:
        """Whether it was decided to."""
        decision = self._of(done)
        return n_plain < decision.ttl_rounds and decision.way is None and decision.rate > 0.0

    def pause(self, done: Round, host_s: float) -> int:
        """As many as make asking a hundredth of their time, by how often it was in vain lately."""
        return self._backoff.pause(done, host_s)


def ladder(steps: Sequence[int], *ends: int) -> tuple[int, ...]:
    """The steps up to the last end, and the ends."""
    return tuple(sorted({n for n in (*steps, *ends) if 0 < n <= max(ends, default=0)}))
