"""Chooses what a round drafts and verifies: as told, or (`auto`) what pays for itself.

docs/develop/design.md has `auto` on one page. Everything is counted in tokens: seconds are worth
the tokens that the best known way to decode makes of them (Dinkelbach's method), and losses are
counted in plain rounds. Nothing here reads a clock: equal rounds give equal choices.

The idea of letting the measured cost of the next node decide: CaDDTree, arXiv 2606.01813.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..native import NO_THRESHOLD, BreakEven, select_nodes
from .cost_model import CostModel, Round
from .proposers.proposer import CHAIN, TOP1, TREE, Proposer, SpeculativeState
from .tree import Tree

Floats = NDArray[np.float64]

SHARE = 0.01
"""Share of the running time that a proposer may lose to plain decoding, and deciding may take."""
CREDIT = 0.64
"""Plain rounds that a proposer may lose before any were run."""
SAVED, OWED = 64.0, 2.0
"""Plain rounds that a proposer can save up, and owe. A long draft that fails costs up to ten."""
MEMORY = 16
"""Rounds after which one weighs 1/e in what is expected of others."""
MAX_TTL_ROUNDS = 256
"""Rounds after which a decision is made anew at the latest."""
LENGTHS = (3, 7, 15)
"""Positions of drafts, beside the longest: their verify fills 4, 8 or 16 rows of a kernel."""
SIZES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127, 191, 255)
"""Nodes that a pass may verify: kernels change at multiples of 4 and 8 rows."""
UNTRIED = 0.1
"""Tokens that doubling the nodes of a chain to a tree is taken to add, before one was drafted, by
those expected of the chain and its chance to fail."""


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A draft that costs a pass of its proposer: positions, and one of the shapes of proposals."""

    proposer: str
    n_positions: int
    shape: str


class Controller:
    """Chooses twice a round: before the draft how long it is, after it what is verified.

    n_nodes: most nodes that it would verify of one sequence now. longest: most positions of a
    proposal.
    """

    n_nodes: int
    longest: int

    def break_even(self, done: Round) -> BreakEven:  # noqa: ARG002
        """Returns what proposals that cost no pass must promise."""
        return NO_THRESHOLD

    def plan(
        self, done: Round, requests: Sequence[SpeculativeState], proposers: Sequence[Proposer]
    ) -> DraftPlan | None:
        """Chooses among proposers that need a pass; the others have proposed already."""
        raise NotImplementedError

    def select(self, done: Round, trees: Sequence[Tree], limits: Sequence[int]) -> list[Tree]:
        """Returns the part of each tree to verify: so many nodes below the root at most, or none.

        trees: of the sequences that anything is proposed for.
        """
        raise NotImplementedError

    def observe(self, done: Round) -> None:
        """Learns from a round, if it learns."""

    def max_skip(self, done: Round, ask_s: float) -> int:  # noqa: ARG002
        """Returns the most plain rounds without asking anybody, if asking takes ask_s."""
        return 0


class FixedController(Controller):
    """The same size every round, less only where the answer or the context ends."""

    def __init__(self, shape: str, size: int, longest: int, least: int = 0) -> None:
        """shape: CHAIN, TREE or MAIN_CHAIN. longest: positions.

        size, least: nodes; fewer than the latter are dropped.
        """
        self._shape, self.n_nodes, self._least = shape, size, least
        self.longest = min(size, longest)

    def plan(
        self,
        done: Round,  # noqa: ARG002
        requests: Sequence[SpeculativeState],
        proposers: Sequence[Proposer],
    ) -> DraftPlan | None:
        """Returns the same plan for the first proposer always."""
        limit = max(request.limit for request in requests)
        if not proposers or min(limit, self.longest) < self._least:
            return None
        return DraftPlan(proposers[0].name, self.longest, self._shape)

    def select(self, done: Round, trees: Sequence[Tree], limits: Sequence[int]) -> list[Tree]:  # noqa: ARG002
        """Returns the likeliest chain, or the likeliest nodes."""
        found = [
            (tree.main_chain() if self._shape == CHAIN else tree).first(min(self.n_nodes, limit))
            for tree, limit in zip(trees, limits, strict=True)
        ]
        return [tree if tree.n_drafted >= self._least else tree.first(0) for tree in found]


class ProposerStats:
    """What one proposer was seen to bring, and its loss budget.

    balance: plain rounds that it may still lose; below zero it rests. n_misses: drafts in a row of
    which nothing was accepted. tree: expected tokens of its trees of SIZES nodes, by those of
    chains of as many; None before one was drafted.
    """

    def __init__(self) -> None:
        self.balance = CREDIT
        self.n_misses = 0
        self.tree: Floats | None = None
        self._n_trees = 0

    def book(self, rounds: float) -> None:
        """Adds plain rounds that were gained, earned as time went by, or (below 0) lost."""
        self.balance = min(max(self.balance + rounds, -OWED), SAVED)

    def add_tree(self, tree: Tree, chains: Floats) -> None:
        """Takes up a draft: its likeliest nodes, and tokens expected of chains of SIZES nodes."""
        gains = np.cumsum(np.exp(tree.log_probs[1:]))
        gains = gains[np.minimum(SIZES, len(gains)) - 1] - chains
        self._n_trees = min(self._n_trees + 1, MEMORY)
        before = gains if self.tree is None else self.tree
        self.tree = before + (gains - before) / self._n_trees

    def gains(self, path: Floats, n_positions: int, shape: str) -> Floats:
        """Tokens beyond the first that a draft promises by nodes verified, float64 [len(SIZES)].

        path: tokens expected of chains of 0, 1, 2 ... positions.
        """
        chains: Floats = path[np.minimum(SIZES, n_positions)]
        if shape == TOP1:
            return chains
        if self.tree is not None:
            trees: Floats = chains + np.maximum(self.tree, 0.0)
            return trees
        return chains


@dataclass(slots=True)
class ControllerState:
    """What outlives answers: measured costs, what proposers bring, the rate of the last rounds."""

    costs: CostModel = field(default_factory=CostModel)
    stats: defaultdict[str, ProposerStats] = field(
        default_factory=lambda: defaultdict(ProposerStats)
    )
    rates: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Tokens and seconds of the last rounds, by sequences."""
    choose_s: float = 0.0
    """Seconds of a decision, on average."""
    since_plain: int = 0
    """Rounds since a plain one whose time tells of plain decoding."""
    was_plain: bool = True


@dataclass(slots=True)
class Decision:
    """What is drafted for some rounds of as many sequences.

    ttl_rounds: rounds until it is made anew. plan: None for nothing that costs a pass. is_look:
    True if the plan is expected to lose, and is run to see what it brings. rate: tokens a second of
    the best known way to decode; 0 if that is not known. gain: tokens a round that the plan wins
    over plain decoding. prices: tokens that candidates must bring.
    """

    ttl_rounds: int = 0
    plan: DraftPlan | None = None
    is_look: bool = False
    rate: float = 0.0
    gain: float = 0.0
    prices: BreakEven = NO_THRESHOLD
    plain_s: float = 0.0


class AutoController(Controller):
    """What pays for itself, for the requests of one engine."""

    def __init__(
        self, state: ControllerState, longest: int, most: int, least: int = 0, *, deepest: int = 0
    ) -> None:
        """longest: positions of a draft that costs a pass. most: nodes of a pass for each sequence.

        least: nodes; fewer are dropped. deepest: positions of other proposals, at least longest.
        """
        self._state, self.n_nodes, self._least = state, most, max(least, 1)
        self.longest = min(max(longest, deepest), most)
        self._longest = min(longest, most)
        self._sizes = [size for size in SIZES if self._least <= size <= most] or [most]
        self._decisions: dict[tuple[int, int], Decision] = {}  # by sequences, and those asked for
        self._decision = Decision()  # this round's
        self._path: Floats = np.zeros(1)
        self._must_be_plain = self._has_decided = False

    # ---- before the draft

    def break_even(self, done: Round) -> BreakEven:
        """Returns what a pass costs; beside a draft's nodes others come cheaper."""
        decision = self._decisions.get((done.n_sequences, done.n_asked))
        return NO_THRESHOLD if decision is None or decision.plan else decision.prices

    def plan(
        self, done: Round, requests: Sequence[SpeculativeState], proposers: Sequence[Proposer]
    ) -> DraftPlan | None:
        """Returns the plan of the last decision or of a new one, unless copies bring as much."""
        limit = max(request.limit for request in requests)
        key = done.n_sequences, done.n_asked
        decision = self._decisions.get(key)
        self._has_decided = decision is None or decision.ttl_rounds <= 0
        if decision is None or decision.ttl_rounds <= 0:
            decision = self._decisions[key] = self._decide(done, requests, proposers, limit)
        self._decision, self._must_be_plain = decision, False
        plan = decision.plan
        if plan is None or limit < self._least:
            return None
        if not decision.is_look:
            self._must_be_plain = self._is_plain_due(decision.gain / done.n_sequences)
            if self._must_be_plain or self._copies_bring(decision.gain, done, requests):
                return None
        done.free = ()  # one or the other: what both propose would be nobody's gain
        for request in requests:
            request.proposed.clear()
        return DraftPlan(plan.proposer, min(plan.n_positions, limit), plan.shape)

    def _is_plain_due(self, gain: float) -> bool:
        """True if a plain round costs no more than SHARE of what was gained since the last one.

        gain: plain rounds that it gives up. It takes two, as the first is slower: drafting has left
        the target's weights out of the CPU's caches.
        """
        return self._state.since_plain * SHARE >= 2.0 * gain

    def _copies_bring(self, gain: float, done: Round, requests: Sequence[SpeculativeState]) -> bool:
        """True if what is proposed already promises as much as a draft."""
        asked = [request for request in requests if request.proposed]
        trees = [request.merged() for request in asked]
        value, _ = self._best(done, trees, [request.n_room - 1 for request in asked])
        return value >= gain and value > 0.0

    def _decide(
        self,
        done: Round,
        requests: Sequence[SpeculativeState],
        proposers: Sequence[Proposer],
        limit: int,
    ) -> Decision:
        """Chooses the plan of most tokens a second, or none."""
        state, costs, n = self._state, self._state.costs, done.n_sequences
        if not costs.knows_plain_of(n):
            return Decision(1)
        plain_s = max(costs.plain_s(done.position, n), 1e-9)
        tokens, seconds = state.rates.get(n, (0.0, 1.0))
        rate = max(n / plain_s, tokens / seconds)
        ttl = math.ceil(min(max(state.choose_s / (SHARE * plain_s), 1.0), MAX_TTL_ROUNDS))
        arms = [
            arm
            for proposer in proposers
            if state.stats[proposer.name].balance >= 0.0
            for arm in self._arms(done, requests, proposer, limit)
        ]
        decision = Decision(max(ttl, MEMORY), rate=rate)
        if arms:
            tokens, seconds, plan = max(
                arms, key=lambda arm: arm[0] / arm[1] * (1.0 + SHARE * (arm[2].shape == TREE))
            )
            loss = seconds / plain_s - tokens / n
            if loss < 0.0:
                gain = tokens * plain_s / seconds - n
                decision = Decision(ttl, plan, False, rate, gain)
            elif state.stats[plan.proposer].balance >= loss:
                decision = Decision(1, plan, True, rate)
        decision.prices = self._price(done, decision.rate)
        decision.plain_s = plain_s
        return decision

    def _arms(
        self, done: Round, requests: Sequence[SpeculativeState], proposer: Proposer, limit: int
    ) -> list[tuple[float, float, DraftPlan]]:
        """Tokens and seconds that rounds promise with each draft of a proposer."""
        asked = [request for request in requests if proposer.name not in request.failed]
        if not asked:
            return []
        costs, stats, n = self._state.costs, self._state.stats[proposer.name], done.n_sequences
        probs = np.mean([proposer.expected_path_probs(x.scorer) for x in asked], axis=0)
        longest = min(self._longest, proposer.max_draft, limit)
        self._path = path = np.concatenate([[0.0], np.cumsum(probs)])
        counts = [n + len(asked) * size for size in SIZES]
        passes = [
            np.where(
                np.isin(SIZES, self._sizes), costs.passes_s(done.position, counts, tree, n), np.inf
            )
            for tree in (False, True)
        ]
        arms = []
        for n_positions in sorted({*(x for x in LENGTHS if x < longest), longest}):
            if n_positions < self._least:
                continue
            for shape in (TOP1, TREE):
                tokens = n + len(asked) * stats.gains(path, n_positions, shape)
                draft_s = costs.draft_s(len(asked) * (n_positions + 1), shape == TOP1)
                seconds = draft_s + passes[0] + tokens * costs.sample.value
                if shape == TREE:  # chains of its likeliest nodes may be verified, too
                    more = np.array(SIZES) > n_positions
                    seconds = (
                        draft_s
                        + np.where(more, passes[1], np.minimum(*passes))
                        + tokens * costs.sample.value
                    )
                worst = seconds / costs.plain_s(done.position, n) - 1.0
                seconds = np.where(worst <= stats.balance + OWED, seconds, np.inf)
                at = int((tokens / np.maximum(seconds, 1e-9)).argmax())
                plan = DraftPlan(proposer.name, n_positions, shape)
                if np.isfinite(seconds[at]):
                    arms.append((float(tokens[at]), max(float(seconds[at]), 1e-9), plan))
        return arms

    def _price(self, done: Round, rate: float) -> BreakEven:
        """Tokens that candidates must bring, by their number, for chains and for trees."""
        costs, n = self._state.costs, done.n_sequences
        plain_s = costs.plain_s(done.position, n) - n * costs.sample.value
        counts = [n + size for size in self._sizes]
        prices = [
            [rate * max(pass_s - plain_s, 0.0) for pass_s in passes]
            for passes in (costs.passes_s(done.position, counts, tree, n) for tree in (False, True))
        ]
        return BreakEven(self._sizes, *prices)

    # ---- after it

    def select(self, done: Round, trees: Sequence[Tree], limits: Sequence[int]) -> list[Tree]:
        """Returns the nodes that are worth their rows; a look verifies some at least."""
        if done.proposer and not done.is_top1:
            for tree in trees:
                stats = self._state.stats[done.proposer]
                stats.add_tree(tree, stats.gains(self._path, done.n_positions, TOP1))
        value, found = self._best(done, trees, limits)
        is_worth = value > 0.0 and not self._must_be_plain
        if not done.proposer and is_worth:
            is_worth = not self._is_plain_due(value / done.n_sequences)
        is_worth |= bool(done.proposer) and self._decision.is_look
        return found if found and is_worth else [tree.first(0) for tree in trees]

    def _best(
        self, done: Round, trees: Sequence[Tree], limits: Sequence[int]
    ) -> tuple[float, list[Tree]]:
        """Tokens beyond what their seconds are worth, and what is then verified of each tree.

        All chains or all trees: some layers take longer for a tree, whatever its size.
        """
        decision, stats = self._decision, self._state.stats
        names = (done.proposer,) if done.proposer else done.free
        balance = min([stats[name].balance for name in names], default=0.0)
        if not trees or decision.rate == 0.0 or (balance < 0.0 and not done.proposer):
            return 0.0, []
        if done.proposer:
            draft_s = self._state.costs.draft_s(done.n_draft_rows, done.is_top1)
            balance -= draft_s / decision.plain_s
        most = decision.rate * decision.plain_s * (balance + OWED)
        prices = decision.prices
        if most < max(prices.chains[-1], prices.trees[-1]):
            lists = prices.chains, prices.trees
            lists = [[x if x <= most else math.inf for x in y] for y in lists]
            prices = BreakEven(prices.sizes, *lists)
        selection = select_nodes(
            [tree.parents for tree in trees],
            [tree.log_probs for tree in trees],
            limits,
            prices,
            min_value=-math.inf if decision.is_look else 0.0,
        )
        if not any(selection.counts):
            return 0.0, []
        parts = trees if selection.is_tree else [tree.main_chain() for tree in trees]
        found = [part.first(n) for part, n in zip(parts, selection.counts, strict=True)]
        return selection.value, found

    # ---- after the round

    def observe(self, done: Round) -> None:
        """Books what the round has lost or gained, and files what it took."""
        state, costs, n = self._state, self._state.costs, done.n_sequences
        if self._has_decided:
            self._has_decided = False
            state.choose_s += (done.choose_s - state.choose_s) / min(4.0, 1.0 + costs.n_observed)
        plain_s = costs.plain_s(done.position, n) if costs.knows_plain_of(n) else 0.0
        seconds = done.seconds
        if done.is_timing_shared and plain_s > 0.0:
            seconds = costs.expected_s(done)
        elif plain_s > 0.0 and not costs.is_warm(done):  # the first run of a shape builds its graph
            seconds = min(seconds, costs.expected_s(done))
        if plain_s > 0.0:
            self._book(done, seconds / plain_s)
            self._observe_rate(done, seconds, plain_s)
        is_cold = done.is_plain and not state.was_plain and plain_s > 0.0
        if not (is_cold or done.is_timing_shared):
            costs.observe(done)
        state.since_plain = 0 if done.is_plain and not is_cold else state.since_plain + 1
        state.was_plain = done.is_plain
        decision = self._decisions.get((n, done.n_asked))
        if decision is not None:
            failed = done.proposer and not done.n_drafted
            decision.ttl_rounds = 0 if failed else decision.ttl_rounds - 1

    def _book(self, done: Round, rounds: float) -> None:
        """Books a round that took as long as so many plain ones."""
        n, all_stats = done.n_sequences, self._state.stats
        for name in {*all_stats, *done.free, done.proposer} - {""}:
            all_stats[name].book(SHARE * rounds / min(1 + all_stats[name].n_misses, 4))
        lost = rounds - done.n_tokens / n
        if done.proposer and done.n_drafted:
            stats = all_stats[done.proposer]
            stats.n_misses = 0 if done.n_accepted else stats.n_misses + 1
        if not done.is_plain:
            for name in (done.proposer,) if done.proposer else done.free:
                all_stats[name].book(-lost)

    def _observe_rate(self, done: Round, seconds: float, plain_s: float) -> None:
        n, keep = done.n_sequences, 1.0 - 1.0 / MEMORY
        before = self._state.rates.get(n, (float(MEMORY * n), MEMORY * plain_s))  # as if plain
        self._state.rates[n] = (
            keep * before[0] + done.n_tokens,
            keep * before[1] + seconds,
        )

    def max_skip(self, done: Round, ask_s: float) -> int:
        """Returns the plain rounds that make asking SHARE of their time."""
        plain_s = self._state.costs.plain_s(done.position, done.n_sequences)
        return int(ask_s / max(SHARE * plain_s, 1e-9))
