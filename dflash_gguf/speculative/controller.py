"""Controllers: choose a round's draft and the nodes to verify, by fixed sizes or by expected gain.

AutoController values one second at the tokens that decoding makes in it (Dinkelbach's method):
gains are in tokens, losses in plain rounds. No controller reads a clock: equal rounds give equal
decisions. docs/develop/design.md describes `auto` on one page. Source of deciding by the measured
cost of the next node: CaDDTree, arXiv 2606.01813.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ..native import NO_THRESHOLD, BreakEven, select_nodes
from .cost_model import CostModel, Round
from .proposers.proposer import CHAIN, TOP1, TREE, Proposer, SpeculativeState
from .tree import Tree

Requests = Sequence[SpeculativeState]
Proposers = Sequence[Proposer]

SHARE = 0.01
"""Share of the running time that a proposer may lose compared with plain decoding; decisions may
take as much. A round of n sequences divides this share by sqrt(n), as drafts gain less."""
CREDIT = 2.0
"""Initial balance of a proposer's loss budget, in plain rounds. With 0.64, calls in vain and first
misses ended drafts that pay: chat with SmolLM2's n-gram table was 5 % slower."""
SAVED, OWED = 24.0, 2.0
"""Largest balance of a proposer's loss budget, and its largest debt, in plain rounds."""
RARE = 0.001
"""Probability of consecutive misses below which a proposer's expected acceptance is rejected."""
MEMORY = 16
"""Number of newer rounds or drafts after which a measured value weighs 1/e in a running mean."""
STALL = 2.0
"""Multiple of its expected time from which a round counts as expected: another process delayed it,
or its graph was built. A delay that was booked to the draft ended drafting for 200 rounds."""
MAX_TTL_ROUNDS = 256
"""Maximum rounds that a decision stays valid, and maximum rounds between two probes."""
SIZES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127, 191, 255)
"""Numbers of nodes that a pass may verify for one sequence; a pass of n sequences has the same
numbers of rows. Each number needs a graph, and kernels change at multiples of 4 and 8 rows."""


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A plan to run one proposer's forward pass: its number of positions, and the draft's shape."""

    proposer: str
    n_positions: int
    shape: str


class Controller:
    """Chooses each round's draft before the pass, and the candidates that the pass verifies.

    n_nodes: maximum verified nodes of a sequence. longest: maximum positions of a draft.
    """

    n_nodes: int
    longest: int

    def break_even(self, done: Round) -> BreakEven:  # noqa: ARG002
        """Returns the break-even for candidates of proposers that need no forward pass."""
        return NO_THRESHOLD

    def plan(self, done: Round, requests: Requests, proposers: Proposers) -> DraftPlan | None:
        """Chooses a draft that needs a forward pass, or None; the other proposers ran before."""
        raise NotImplementedError

    def select(self, done: Round, trees: Sequence[Tree], limits: Sequence[int]) -> list[Tree]:
        """Returns the part of each tree to verify, with at most limits[i] nodes below the root."""
        raise NotImplementedError

    def observe(self, done: Round) -> None:
        """Learns from the times and accepted tokens of a finished round."""

    def asks(self, names: Sequence[str]) -> bool:  # noqa: ARG002
        """Returns True if the next round is to call the named proposers."""
        return True

    def rest(self, done: Round) -> None:
        """Counts a finished round that called no proposer."""


class FixedController(Controller):
    """A controller of fixed draft size; drafts less only where the answer or context ends."""

    def __init__(self, shape: str, size: int, longest: int, least: int = 0) -> None:
        """Creates a controller. size: nodes of a draft. least: drafts below this are dropped."""
        self._shape, self.n_nodes, self._least = shape, size, least
        self.longest = min(size, longest)

    def plan(self, done: Round, requests: Requests, proposers: Proposers) -> DraftPlan | None:  # noqa: ARG002
        """Returns the draft plan for the first proposer; None if too few positions are left."""
        limit = max(request.limit for request in requests)
        if not proposers or min(limit, self.longest) < self._least:
            return None
        return DraftPlan(proposers[0].name, self.longest, self._shape)

    def select(self, done: Round, trees: Sequence[Tree], limits: Sequence[int]) -> list[Tree]:  # noqa: ARG002
        """Selects the first nodes of each tree, or of its main chain if drafts are chains."""
        found = [
            (tree.main_chain() if self._shape == CHAIN else tree).first(min(self.n_nodes, limit))
            for tree, limit in zip(trees, limits, strict=True)
        ]
        return [tree if tree.n_drafted >= self._least else tree.first(0) for tree in found]


class ProposerStats:
    """Measured acceptance of one proposer, and its loss budget.

    balance: plain rounds that the proposer may still lose; below 0 it is disabled. n_misses:
    consecutive drafts without an accepted candidate. n_waited: rounds since the last draft. wait:
    rounds between a draft and the next probe. path[i]: expected accepted tokens of a chain of i
    nodes. tree_gains[j]: expected accepted tokens of a tree of SIZES[j] nodes beyond a chain's.
    """

    def __init__(self) -> None:
        self.balance = CREDIT
        self.n_misses = self.n_waited = self.wait = 0
        self.path = [0.0, 0.0]
        self.tree_gains = [0.0] * len(SIZES)
        self._n_trees = 0

    @property
    def is_believed(self) -> bool:
        """False if the latest consecutive misses are improbable under the expected acceptance."""
        return (1.0 - self.path[1]) ** self.n_misses >= RARE

    def book(self, rounds: float) -> None:
        """Adds won or (if negative) lost plain rounds to the balance of the loss budget."""
        self.balance = min(max(self.balance + rounds, -OWED), SAVED)

    def add_draft(self, n_accepted: int, is_probe: bool) -> None:
        """Counts a draft as a hit or a miss; a failed probe doubles the wait for the next probe."""
        self.n_misses = 0 if n_accepted else self.n_misses + 1
        self.n_waited = 0
        if is_probe:
            self.wait = 0 if n_accepted else min(2 * self.wait + 1, MAX_TTL_ROUNDS)

    def add_tree(self, tree: Tree) -> None:
        """Updates the mean expected gain of trees over their main chains by a new draft."""
        by_tree, by_chain = (
            list(accumulate(map(math.exp, x.log_probs[1:]))) for x in (tree, tree.main_chain())
        )
        self._n_trees = min(self._n_trees + 1, MEMORY)
        for i, size in enumerate(SIZES):
            gain = by_tree[:size][-1] - by_chain[:size][-1]
            self.tree_gains[i] += (gain - self.tree_gains[i]) / self._n_trees

    def expected(self, n_positions: int, shape: str) -> list[float]:
        """Returns the expected accepted tokens of a draft for each number of nodes in SIZES."""
        chains = [self.path[min(size, n_positions)] for size in SIZES]
        if shape == TOP1:
            return chains
        return [x + max(gain, 0.0) for x, gain in zip(chains, self.tree_gains, strict=True)]


@dataclass(slots=True)
class ControllerState:
    """Learned state that outlives requests: measured costs, statistics of proposers, recent speed.

    rates: decayed sums of tokens and seconds of recent rounds, by number of sequences. choose_s:
    mean seconds of a decision. since_plain: rounds since the last plain round whose time was filed.
    was_plain: True if the last round was plain.
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
    """A decision of the auto controller about the next rounds with a given number of sequences.

    ttl_rounds: rounds until the next decision. plan: the draft, None for no draft. is_probe: True
    if the plan is expected to lose and only measures acceptance. gain: expected tokens of a round
    beyond plain decoding. plain_tokens: tokens that decoding makes in the time of a plain round; 0
    if unknown. break_even: tokens that candidates must gain.
    """

    ttl_rounds: int = 1
    plan: DraftPlan | None = None
    is_probe: bool = False
    gain: float = 0.0
    plain_tokens: float = 0.0
    break_even: BreakEven = NO_THRESHOLD


class AutoController(Controller):
    """The controller of `--draft auto`: drafts only where a gain is expected, or as a probe."""

    def __init__(
        self, state: ControllerState, longest: int, max_nodes: int, min_nodes: int = 0
    ) -> None:
        """Creates a controller of drafts of min_nodes to max_nodes nodes, up to `longest` deep."""
        self._state, self.n_nodes, self._min_nodes = state, max_nodes, max(min_nodes, 1)
        self.longest = min(longest, max_nodes)
        # Each size with its index in SIZES; max_nodes itself if no size lies within the bounds.
        self._sizes = [
            (i, x) for i, x in enumerate(SIZES) if self._min_nodes <= x <= max_nodes
        ] or [(bisect(SIZES, max_nodes), max_nodes)]
        # Keys of the decisions: numbers of decoding sequences, and of sequences with speculation.
        self._decisions: dict[tuple[int, int], Decision] = {}
        self._decision = Decision()
        self._has_decided = False

    def break_even(self, done: Round) -> BreakEven:
        """Returns lookup candidates' break-even; NO_THRESHOLD if a draft pays for the pass."""
        decision = self._decisions.get((done.n_sequences, done.n_asked), Decision())
        return NO_THRESHOLD if decision.plan else decision.break_even

    def plan(self, done: Round, requests: Requests, proposers: Proposers) -> DraftPlan | None:
        """Returns the draft; None if lookup candidates gain as much or a plain round is due."""
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
        done.free = ()  # drops lookup candidates, as a gain is booked to one proposer
        for request in requests:
            request.proposed.clear()
        return DraftPlan(plan.proposer, min(plan.n_positions, limit), plan.shape)

    def _is_plain_due(self, gain: float) -> bool:
        """Returns True if a new measurement of plain decoding is due.

        gain: plain rounds that one round of plain decoding loses compared with drafting. A
        measurement takes two rounds, as drafting has evicted the target's weights from the CPU
        caches before the first. A measurement is due if its loss is at most SHARE of the rounds
        since the last one.
        """
        return self._state.since_plain * SHARE >= 2.0 * gain

    def _is_other_due(self, other: DraftPlan, best: DraftPlan, lost: float) -> bool:
        """Returns True if a proposer that is expected to be slower than the best is due.

        Its acceptance may have changed since its last draft. lost: plain rounds that its draft is
        expected to lose compared with the best draft, at most SHARE of the rounds since the last.
        """
        n_waited = self._state.stats[other.proposer].n_waited
        return other.proposer != best.proposer and n_waited >= max(lost / SHARE, MEMORY)

    def _copies_bring(self, gain: float, done: Round, requests: Requests) -> bool:
        """Returns True if candidates that need no pass are expected to gain as much as a draft."""
        asked = [request for request in requests if request.proposed]
        trees = [request.merged() for request in asked]
        value, _ = self._best(done, trees, [request.n_room - 1 for request in asked])
        return value >= gain and value > 0.0

    def _decide(
        self, done: Round, requests: Requests, proposers: Proposers, limit: int
    ) -> Decision:
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
            for other_tokens, other_s, other in options:
                lost = (tokens * other_s / seconds - other_tokens) / n
                if self._is_other_due(other, plan, lost):
                    decision.plan, decision.ttl_rounds, decision.is_probe = other, 1, True
        elif stats.balance >= loss and stats.n_waited >= stats.wait:
            decision.plan, decision.ttl_rounds, decision.is_probe = plan, 1, True
        return decision

    def _options(
        self, done: Round, requests: Requests, proposer: Proposer, limit: int
    ) -> list[tuple[float, float, DraftPlan]]:
        """Returns expected tokens and seconds, and plan, of each draft that the budget affords."""
        asked = [request for request in requests if proposer.name not in request.failed]
        if not asked:
            return []
        costs, stats, n = self._state.costs, self._state.stats[proposer.name], done.n_sequences
        m = len(asked)
        paths = [proposer.expected_path_probs(request.scorer) for request in asked]
        stats.path = [0.0, *accumulate(sum(probs) / m for probs in zip(*paths, strict=True))]
        most_s = (1.0 + stats.balance + OWED) * costs.plain_s(done.position, n)
        counts = [n + m * size for _, size in self._sizes]
        passes_s = [costs.passes_s(done.position, counts, x, n) for x in (False, True)]
        longest = min(self.longest, proposer.max_draft, limit)
        options = []
        for n_positions in sorted({min(x, longest) for x in proposer.lengths} | {longest}):
            for shape in (TOP1, TREE) if n_positions >= self._min_nodes else ():
                n_rows = proposer.draft_rows([n_positions] * m)
                draft_s = costs.draft_s(proposer.name, n_rows, shape == TOP1)
                expected, best = stats.expected(n_positions, shape), (0.0, 1.0)
                for (i, size), chains_s, trees_s in zip(self._sizes, *passes_s, strict=True):
                    tokens = n + m * expected[i]
                    pass_s = trees_s if shape == TREE and n_positions < size else chains_s
                    seconds = draft_s + pass_s + tokens * costs.sample.value
                    if seconds <= most_s and tokens * best[1] > best[0] * seconds:
                        best = tokens, seconds
                    if shape == TOP1 and size >= n_positions:
                        break
                if best[0] > 0.0:
                    options.append((*best, DraftPlan(proposer.name, n_positions, shape)))
        return options

    def _break_even(self, done: Round, rate: float) -> BreakEven:
        costs, n = self._state.costs, done.n_sequences
        plain_s = costs.plain_s(done.position, n) - n * costs.sample.value
        nodes = (1 + size - n for size in SIZES)
        sizes = [x for x in nodes if self._min_nodes <= x <= n * self.n_nodes] or [self.n_nodes]
        counts = [n + size for size in sizes]
        chains, trees = (
            [
                rate * max(pass_s - plain_s, 0.0)
                for pass_s in costs.passes_s(done.position, counts, x, n)
            ]
            for x in (False, True)
        )
        return BreakEven(sizes, chains, trees)

    def select(self, done: Round, trees: Sequence[Tree], limits: Sequence[int]) -> list[Tree]:
        """Selects the nodes that are worth their rows' cost; a probe verifies nodes in any case.

        A top-1 draft is verified whole, as the plan chose its length by the same expected gain.
        """
        if done.is_top1:
            whole = [tree.first(limit) for tree, limit in zip(trees, limits, strict=True)]
            is_enough = sum(tree.n_drafted for tree in whole) >= self._min_nodes
            return whole if is_enough else [tree.first(0) for tree in whole]
        if done.proposer:
            for tree in trees:
                self._state.stats[done.proposer].add_tree(tree)
        value, selected = self._best(done, trees, limits)
        is_worth = value > 0.0 or (done.proposer and self._decision.is_probe)
        is_due = not done.proposer and self._is_plain_due(value / done.n_sequences)
        return selected if selected and is_worth and not is_due else [x.first(0) for x in trees]

    def _best(
        self, done: Round, trees: Sequence[Tree], limits: Sequence[int]
    ) -> tuple[float, list[Tree]]:
        """Returns the expected gain in tokens, and the nodes to verify of each tree.

        Either all drafts are chains or all are trees, as some layers take longer for any tree.
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
        """Books a finished round's gain or loss to its proposers, and files its measured times."""
        state, costs, n = self._state, self._state.costs, done.n_sequences
        if self._has_decided:
            self._has_decided = False
            state.choose_s += (done.choose_s - state.choose_s) / min(4.0, 1.0 + costs.n_observed)
        is_known = costs.knows_plain(n)
        if is_known:
            plain_s, seconds = costs.plain_s(done.position, n), done.seconds
            expected_s = costs.expected_s(done)
            # No draft is to blame for a stall, or for a first run, which builds graphs.
            if done.is_timing_shared or seconds > STALL * expected_s:
                seconds = expected_s
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
        all_stats = self._state.stats
        solvent = [name for name in done.asked if all_stats[name].balance >= 0.0]
        self._earn(done, rounds, {*all_stats, *done.free, done.proposer} - {""})
        if done.is_plain:
            plain_s = self._state.costs.plain_s(done.position, done.n_sequences)
            for name in solvent:  # a round at most: a first call reads a table from disk
                all_stats[name].book(-min((done.choose_s + done.draft_s) / plain_s, 1.0))
            return
        if done.proposer:
            all_stats[done.proposer].add_draft(done.n_accepted, self._decision.is_probe)
        for name in (done.proposer,) if done.proposer else done.free:
            all_stats[name].book(done.n_tokens / done.n_sequences - rounds)

    def _earn(self, done: Round, rounds: float, names: Collection[str]) -> None:
        for name in names:
            stats = self._state.stats[name]
            stats.book(rounds * SHARE / math.sqrt(done.n_sequences))
            stats.n_waited += 1

    def asks(self, names: Sequence[str]) -> bool:
        """Returns True if one of the named proposers can afford a draft."""
        return any(self._state.stats[name].balance >= 0.0 for name in names)

    def rest(self, done: Round) -> None:
        """Counts a round that called no proposer: proposers earn, and decisions get older."""
        self._earn(done, 1.0, self._state.stats)
        if decision := self._decisions.get((done.n_sequences, done.n_asked)):
            decision.ttl_rounds -= 1


def _preference(option: tuple[float, float, DraftPlan]) -> float:
    """Returns a draft's tokens per second; trees get 1 % more, as they train the calibration."""
    tokens, seconds, plan = option
    return tokens / seconds * (1.0 + SHARE * (plan.shape == TREE))
