"""Chooses the draft of a round and the nodes to verify: a fixed size, or (`auto`) by measured gain.

docs/develop/design.md has `auto` on one page. A second is worth the tokens that decoding makes in
it (Dinkelbach's method), so gains are in tokens; losses are in plain rounds. Nothing here reads a
clock: equal rounds give equal choices.

Deciding by the measured cost of the next node is an idea of CaDDTree, arXiv 2606.01813.
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
Requests = Sequence[SpeculativeState]
Proposers = Sequence[Proposer]

SHARE = 0.01
"""Share of the running time that a proposer may lose to plain decoding, and that decisions take. Of
n sequences it is smaller by the root of n, as drafts gain less for many."""
CREDIT = 0.64
"""Plain rounds that a proposer may lose before any were run."""
SAVED, OWED = 24.0, 2.0
"""Plain rounds that a proposer can save up, and owe: bounds of its balance."""
RARE = 0.001
"""Probability of misses in a row, by a proposer's expected acceptance, that refutes the latter."""
MEMORY = 16
"""Rounds (or drafts) after which the weight of one in a running mean has fallen to 1/e."""
MAX_TTL_ROUNDS = 256
"""Longest time to live of a decision, and longest wait for a probe, in rounds."""
LENGTHS = (3, 7, 15)
"""Positions of drafts beside the longest draft: a verify fills 4, 8 or 16 rows of a kernel."""
SIZES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127, 191, 255)
"""Nodes that a pass of one sequence may verify; of more sequences, as many rows: kernels change at
multiples of 4 and 8 rows, and each number of rows needs a graph."""


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A draft that needs a pass of its proposer: its number of positions, and its shape."""

    proposer: str
    n_positions: int
    shape: str


class Controller:
    """Chooses twice a round: the length of the draft before it, the nodes to verify after it.

    n_nodes: most nodes of a sequence that a pass verifies. longest: most positions of a proposal.
    """

    n_nodes: int
    longest: int

    def break_even(self, done: Round) -> BreakEven:  # noqa: ARG002
        """Returns the tokens that proposals without a pass must promise."""
        return NO_THRESHOLD

    def plan(self, done: Round, requests: Requests, proposers: Proposers) -> DraftPlan | None:
        """Chooses a draft of a proposer that needs a pass. The other proposers have run already."""
        raise NotImplementedError

    def select(self, done: Round, trees: Sequence[Tree], limits: Sequence[int]) -> list[Tree]:
        """Returns the part of each tree to verify, at most limits[i] nodes below the root.

        trees: of the sequences that have candidates.
        """
        raise NotImplementedError

    def observe(self, done: Round) -> None:
        """Learns from a round."""

    def max_skip(self, done: Round) -> int:  # noqa: ARG002
        """Returns how many rounds may follow in which no proposer is asked."""
        return 0


class FixedController(Controller):
    """Verifies the same size every round, less only where the answer or the context ends."""

    def __init__(self, shape: str, size: int, longest: int, least: int = 0) -> None:
        """shape: CHAIN, TREE or MAIN_CHAIN. size: nodes. longest: positions.

        least: drafts of fewer nodes are dropped.
        """
        self._shape, self.n_nodes, self._least = shape, size, least
        self.longest = min(size, longest)

    def plan(self, done: Round, requests: Requests, proposers: Proposers) -> DraftPlan | None:  # noqa: ARG002
        """Returns the same plan every time, for the first proposer."""
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
    """Measured acceptance of one proposer, and its loss budget.

    balance: plain rounds that the proposer may still lose; below zero it rests. n_misses: drafts in
    a row without an accepted candidate. n_waited: rounds since its last draft; wait: rounds from a
    draft to the next probe. path[i]: expected accepted tokens of a chain of i nodes. tree_gains[j]:
    expected accepted tokens of a tree of SIZES[j] nodes beyond those of a chain with as many.
    """

    def __init__(self) -> None:
        self.balance = CREDIT
        self.n_misses = self.n_waited = self.wait = 0
        self.path: Floats = np.zeros(2)
        self.tree_gains: Floats = np.zeros(len(SIZES))
        self._n_trees = 0

    @property
    def is_believed(self) -> bool:
        """False if the last misses in a row are improbable by the expected acceptance."""
        return float(1.0 - self.path[1]) ** self.n_misses >= RARE

    def book(self, rounds: float) -> None:
        """Adds gained, earned or (below 0) lost plain rounds to the balance."""
        self.balance = min(max(self.balance + rounds, -OWED), SAVED)

    def add_draft(self, n_accepted: int, is_probe: bool) -> None:
        """Counts a draft without accepted candidates as a miss. A failed probe doubles the wait."""
        self.n_misses = 0 if n_accepted else self.n_misses + 1
        self.n_waited = 0
        if is_probe:
            self.wait = 0 if n_accepted else min(2 * self.wait + 1, MAX_TTL_ROUNDS)

    def add_tree(self, tree: Tree, n_positions: int) -> None:
        """Updates tree_gains by the expected tokens of a drafted tree of so many positions."""
        promised = np.cumsum(np.exp(tree.log_probs[1:]))[np.minimum(SIZES, tree.n_drafted) - 1]
        self._n_trees = min(self._n_trees + 1, MEMORY)
        gains = promised - self.expected(n_positions, TOP1) - self.tree_gains
        self.tree_gains += gains / self._n_trees

    def expected(self, n_positions: int, shape: str) -> Floats:
        """Returns the expected tokens of a draft beyond the first, [len(SIZES)], by nodes."""
        chains: Floats = self.path[np.minimum(SIZES, n_positions)]
        return chains if shape == TOP1 else chains + np.maximum(self.tree_gains, 0.0)


@dataclass(slots=True)
class ControllerState:
    """Learned state that outlives answers: measured costs, proposers' success, recent speed.

    rates: tokens and seconds of the last rounds, by number of sequences. choose_s: mean seconds of
    a decision. since_plain: rounds since the last plain round whose time was filed. was_plain: True
    if the last round was plain.
    """

    costs: CostModel = field(default_factory=CostModel)
    stats: defaultdict[str, ProposerStats] = field(
        default_factory=lambda: defaultdict(ProposerStats)
    )
    rates: dict[int, tuple[float, float]] = field(default_factory=dict)
    choose_s: float = 0.0
    since_plain: int = 0
    was_plain: bool = True


@dataclass(slots=True)
class Decision:
    """The draft of the coming rounds of as many sequences.

    ttl_rounds: rounds until the next decision. plan: None for no draft. is_probe: True if the plan
    is expected to lose, and is run to measure its acceptance. gain: tokens a round that the plan
    wins over plain decoding. plain_tokens: tokens that decoding makes in the time of a plain round;
    0 if unknown. break_even: tokens that candidates must bring.
    """

    ttl_rounds: int = 1
    plan: DraftPlan | None = None
    is_probe: bool = False
    gain: float = 0.0
    plain_tokens: float = 0.0
    break_even: BreakEven = NO_THRESHOLD


class AutoController(Controller):
    """Drafts by measured gain, for the requests of one engine."""

    def __init__(
        self, state: ControllerState, longest: int, max_nodes: int, min_nodes: int = 0
    ) -> None:
        """longest: most positions of a draft. max_nodes: most nodes of a sequence in a pass.

        min_nodes: drafts of fewer nodes are dropped.
        """
        self._state, self.n_nodes, self._min_nodes = state, max_nodes, max(min_nodes, 1)
        self.longest = min(longest, max_nodes)
        self._nodes = np.array(SIZES)
        self._is_size = (self._min_nodes <= self._nodes) & (self._nodes <= max_nodes)
        self._decisions: dict[tuple[int, int], Decision] = {}  # key: sequences, and those asked for
        self._decision = Decision()
        self._has_decided = False

    def break_even(self, done: Round) -> BreakEven:
        """Returns the tokens that a pass must bring; 0 beside a draft, which pays for the pass."""
        decision = self._decisions.get((done.n_sequences, done.n_asked), Decision())
        return NO_THRESHOLD if decision.plan else decision.break_even

    def plan(self, done: Round, requests: Requests, proposers: Proposers) -> DraftPlan | None:
        """Returns the decision's plan, or None if the candidates at hand gain as much."""
        limit = max(request.limit for request in requests)
        key = done.n_sequences, done.n_asked
        decision = self._decisions.get(key, Decision(0))
        self._has_decided = decision.ttl_rounds <= 0
        if self._has_decided:
            decision = self._decisions[key] = self._decide(done, requests, proposers, limit)
        self._decision, plan = decision, decision.plan
        if plan is None or limit < self._min_nodes:
            return None
        if not decision.is_probe and (
            self._is_plain_due(decision.gain / done.n_sequences)
            or self._copies_bring(decision.gain, done, requests)
        ):
            return None
        done.free = ()  # a gain must be booked to one proposer
        for request in requests:
            request.proposed.clear()
        return DraftPlan(plan.proposer, min(plan.n_positions, limit), plan.shape)

    def _is_plain_due(self, gain: float) -> bool:
        """Returns True if a new measurement of plain decoding costs SHARE of the rounds since one.

        gain: plain rounds that are lost by decoding one round plainly. A measurement takes two, as
        the first is slower: drafting has evicted the target's weights from the CPU's caches.
        """
        return self._state.since_plain * SHARE >= 2.0 * gain

    def _copies_bring(self, gain: float, done: Round, requests: Requests) -> bool:
        """Returns True if the candidates at hand promise as much as a draft."""
        asked = [request for request in requests if request.proposed]
        trees = [request.merged() for request in asked]
        value, _ = self._best(done, trees, [request.n_room - 1 for request in asked])
        return value >= gain and value > 0.0

    def _decide(
        self, done: Round, requests: Requests, proposers: Proposers, limit: int
    ) -> Decision:
        """Chooses the plan of most tokens a second, or none."""
        state, costs, n = self._state, self._state.costs, done.n_sequences
        if not costs.knows_plain(n):
            return Decision()
        plain_s = costs.plain_s(done.position, n)
        ttl = math.ceil(min(max(state.choose_s / (SHARE * plain_s), 1.0), MAX_TTL_ROUNDS))
        tokens, seconds = state.rates.get(n, (n, plain_s))
        decision = Decision(max(ttl, MEMORY), plain_tokens=max(n, tokens * plain_s / seconds))
        decision.break_even = self._break_even(done, decision.plain_tokens / plain_s)
        options = [
            option
            for proposer in proposers
            if (stats := state.stats[proposer.name]).balance >= 0.0
            and (stats.is_believed or stats.n_waited >= stats.wait)
            for option in self._options(done, requests, proposer, limit)
        ]
        if not options:
            return decision
        tokens, seconds, plan = max(options, key=_preference)
        loss = seconds / plain_s - tokens / n
        stats = state.stats[plan.proposer]
        if loss < 0.0 and stats.is_believed:
            decision.plan, decision.ttl_rounds = plan, ttl
            decision.gain = tokens * plain_s / seconds - n
        elif stats.balance >= loss and stats.n_waited >= stats.wait:
            decision.plan, decision.ttl_rounds, decision.is_probe = plan, 1, True
        return decision

    def _options(
        self, done: Round, requests: Requests, proposer: Proposer, limit: int
    ) -> list[tuple[float, float, DraftPlan]]:
        """Returns expected tokens and seconds of a round, for each draft of a proposer.

        The balance covers the cost of each, even if nothing is accepted.
        """
        asked = [request for request in requests if proposer.name not in request.failed]
        if not asked:
            return []
        costs, stats, n = self._state.costs, self._state.stats[proposer.name], done.n_sequences
        probs = np.mean([proposer.expected_path_probs(x.scorer) for x in asked], axis=0)
        stats.path = np.concatenate([[0.0], np.cumsum(probs)])
        most_s = (1.0 + stats.balance + OWED) * costs.plain_s(done.position, n)
        counts = n + len(asked) * self._nodes
        chains_s, trees_s = (costs.passes_s(done.position, counts, x, n) for x in (False, True))
        longest = min(self.longest, proposer.max_draft, limit)
        options = []
        for n_positions in sorted({min(x, longest) for x in LENGTHS} | {longest}):
            for shape in (TOP1, TREE) if n_positions >= self._min_nodes else ():
                tokens = n + len(asked) * stats.expected(n_positions, shape)
                is_tree = (shape == TREE) & (n_positions < self._nodes)
                n_rows = len(asked) * (n_positions + 1)
                draft_s = costs.draft_s(proposer.name, n_rows, shape == TOP1)
                pass_s = np.where(is_tree, trees_s, chains_s)
                seconds = draft_s + pass_s + tokens * costs.sample.value
                rates = np.where(self._is_size & (seconds <= most_s), tokens / seconds, 0.0)
                at = int(rates.argmax())
                if rates[at] > 0.0:
                    plan = DraftPlan(proposer.name, n_positions, shape)
                    options.append((float(tokens[at]), float(seconds[at]), plan))
        return options

    def _break_even(self, done: Round, rate: float) -> BreakEven:
        """Returns the tokens that candidates must bring where a second is worth `rate` tokens."""
        costs, n = self._state.costs, done.n_sequences
        plain_s = costs.plain_s(done.position, n) - n * costs.sample.value
        nodes = (1 + size - n for size in SIZES)
        sizes = [x for x in nodes if self._min_nodes <= x <= n * self.n_nodes] or [self.n_nodes]
        counts = [n + size for size in sizes]
        chains_s, trees_s = (costs.passes_s(done.position, counts, x, n) for x in (False, True))
        chains, trees = (rate * np.maximum(x - plain_s, 0.0) for x in (chains_s, trees_s))
        return BreakEven(sizes, chains.tolist(), trees.tolist())

    def select(self, done: Round, trees: Sequence[Tree], limits: Sequence[int]) -> list[Tree]:
        """Returns the nodes that gain more than their rows cost; a probe always verifies some."""
        if done.proposer and not done.is_top1:
            for tree in trees:
                self._state.stats[done.proposer].add_tree(tree, done.n_positions)
        value, selected = self._best(done, trees, limits)
        is_worth = value > 0.0 or (done.proposer and self._decision.is_probe)
        is_due = not done.proposer and self._is_plain_due(value / done.n_sequences)
        return selected if selected and is_worth and not is_due else [x.first(0) for x in trees]

    def _best(
        self, done: Round, trees: Sequence[Tree], limits: Sequence[int]
    ) -> tuple[float, list[Tree]]:
        """Returns the expected gain in tokens, and the nodes to verify of each tree.

        Either all are chains or all are trees, as some layers take longer for a tree of any size.
        The balance covers the cost of all nodes, even if none is accepted.
        """
        decision, stats, costs = self._decision, self._state.stats, self._state.costs
        names = (done.proposer,) if done.proposer else done.free
        balance = min([stats[name].balance for name in names], default=0.0)
        if not trees or not decision.plain_tokens or (balance < 0.0 and not done.proposer):
            return 0.0, []
        if done.proposer:
            plain_s = costs.plain_s(done.position, done.n_sequences)
            balance -= costs.draft_s(done.proposer, done.n_draft_rows, done.is_top1) / plain_s
        selection = select_nodes(
            [tree.parents for tree in trees],
            [tree.log_probs for tree in trees],
            limits,
            decision.break_even.limited(decision.plain_tokens * (balance + OWED)),
            min_value=-math.inf if decision.is_probe else 0.0,
        )
        if not any(selection.counts):
            return 0.0, []
        parts = trees if selection.is_tree else [tree.main_chain() for tree in trees]
        return selection.value, [
            part.first(n) for part, n in zip(parts, selection.counts, strict=True)
        ]

    def observe(self, done: Round) -> None:
        """Books the round's gain or loss, and files its times."""
        state, costs, n = self._state, self._state.costs, done.n_sequences
        if self._has_decided:
            self._has_decided = False
            state.choose_s += (done.choose_s - state.choose_s) / min(4.0, 1.0 + costs.n_observed)
        is_known = costs.knows_plain(n)
        if is_known:
            plain_s, seconds = costs.plain_s(done.position, n), done.seconds
            if done.is_timing_shared:
                seconds = costs.expected_s(done)
            elif not costs.is_warm(done):  # the first run of a shape builds its graph
                seconds = min(seconds, 2.0 * costs.expected_s(done))
            self._book(done, seconds / plain_s)
            keep = 1.0 - 1.0 / MEMORY
            tokens, before_s = state.rates.get(n, (MEMORY * n, MEMORY * plain_s))
            state.rates[n] = keep * tokens + done.n_tokens, keep * before_s + seconds
        is_cold = done.is_plain and not state.was_plain and is_known
        if not (is_cold or done.is_timing_shared):
            costs.observe(done)
        state.since_plain = 0 if done.is_plain and not is_cold else state.since_plain + 1
        state.was_plain = done.is_plain
        decision = self._decisions.get((n, done.n_asked), Decision())
        failed = done.proposer and not done.n_drafted
        decision.ttl_rounds = 0 if failed else decision.ttl_rounds - 1

    def _book(self, done: Round, rounds: float) -> None:
        """Books a round that took the time of `rounds` plain rounds."""
        all_stats = self._state.stats
        for name in {*all_stats, *done.free, done.proposer} - {""}:
            all_stats[name].book(_share(done) * rounds)
            all_stats[name].n_waited += 1
        if done.is_plain:
            return
        if done.proposer:
            all_stats[done.proposer].add_draft(done.n_accepted, self._decision.is_probe)
        for name in (done.proposer,) if done.proposer else done.free:
            all_stats[name].book(done.n_tokens / done.n_sequences - rounds)

    def max_skip(self, done: Round) -> int:
        """Returns how many rounds to skip so that asking takes at most its share of the time."""
        plain_s = self._state.costs.plain_s(done.position, done.n_sequences)
        return int((done.choose_s + done.draft_s) / max(_share(done) * plain_s, 1e-9))


def _share(done: Round) -> float:
    """Returns the share of a round's time that a proposer may lose, and that decisions take."""
    return SHARE / math.sqrt(done.n_sequences)


def _preference(option: tuple[float, float, DraftPlan]) -> float:
    """Returns a draft's tokens a second, SHARE more for a tree: ranked candidates teach more."""
    tokens, seconds, plan = option
    return tokens / seconds * (1.0 + SHARE * (plan.shape == TREE))
