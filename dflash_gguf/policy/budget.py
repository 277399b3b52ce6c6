"""Drafting that pays for itself: lengths, sizes, chain, tree or nothing, by what they cost and give.

Among the ways a round can go the rule takes the one with the most

    expected tokens - rate * expected seconds

where the rate is what the best way is expected to reach, plain decoding's at least: this is what
makes all rounds together fastest (Dinkelbach's method). Before the draft, what every length would give is the mean
over the last drafts, of which each could have been verified in its own best way; after it, the
draft at hand says which nodes are worth their cost. Costs have steps (kernels change at 4, 8 or 16
rows), so every size of the ladder is compared, not only the next one. Nothing here reads a clock:
equal rounds give equal choices.

The idea of letting the measured cost of the next node decide: CaDDTree, arXiv 2606.01813.
"""  # noqa: E501

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..draft.calibration import Calibrations
from ..draft.tree import Candidates, Tree, chain, grow
from .costs import Costs, Round
from .gains import Gains, ladder

Floats = NDArray[np.float64]

PROBE_SHARE = 0.01
"""Share of the running time that may be lost on probes: drafted rounds that find out whether
drafting has begun to pay."""
HOPEFUL, RAREST = 0.1, 4
"""Chance of a draft's first candidate below which this share is smaller, and by how much at most: a
drafter that is of no use for these texts needs few probes."""
PROBE_AHEAD = 128
"""Plain rounds whose share may be spent at once: on the first probe, or after long without one."""
PROBE_SAVED = 512
"""Plain rounds whose share can be saved for a probe that costs more than that."""
MOST_PAUSED = 64
"""Rounds after which plain decoding is reconsidered at the latest. Deciding takes time as well: a
tenth of a millisecond, which counts where a plain round takes two of them."""
REFRESH = 4
"""Rounds after which the costs of passes are looked up again, those of a new shape at once; and
rounds for which a length that pays, or chains where trees did not pay, are kept without comparing
anew: comparing takes a third of a millisecond, which is noticeable with fast models."""
N_RATE_STEPS = 2
"""Steps towards the best rate in a round; the next one goes on from there."""
SIZES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127, 191, 255)
"""Positions and nodes that are tried. Their verify has 2, 3, 4, 6, 8, 12, 16 ... rows: kernels
change at multiples of 4 and 8 rows, and every other size would need graphs and measurements."""


class Budget:
    """What was learned about one pair on one device. It outlives answers."""

    def __init__(self, costs: Costs | None = None) -> None:
        """costs: what was measured before, if anything was."""
        self.costs = costs or Costs()
        self.calibrations = Calibrations()
        self._lost_s = 0.0
        self.hope = 1.0
        """Chance of a draft's first candidate, as the rules have found it lately."""
        self._since_plain, self._is_cold = 0, False
        self._n_paused = 0
        self._gains: dict[tuple[int, ...], Gains] = {}

    def rule(self, longest: int, most: int, least: int = 0) -> BudgetedRule:
        """For one answer. longest: positions; most: nodes; least: nodes, unless there are none.

        It begins without debts if there is hope: whether drafting pays differs more between answers
        than within one.
        """
        if self.hope >= HOPEFUL:
            self._n_paused, self._lost_s = 0, min(self._lost_s, 0.0)
        lengths = ladder(SIZES, *(n for n in (longest, least) if n <= longest))
        sizes = ladder(SIZES, *(n for n in (longest, most, least) if n <= most))
        key = (*lengths, -1, *sizes)
        gains = self._gains.setdefault(key, Gains(lengths, sizes))
        return BudgetedRule(self, gains, lengths, sizes, least)

    def may_lose(self, seconds: float, position: int, *, may_save: bool = False) -> bool:
        """Whether a probe that will cost so much is affordable. may_save: also from long ago."""
        lost_s = self._lost_s if may_save else max(self._lost_s, 0.0)
        return lost_s + seconds <= PROBE_SHARE * PROBE_AHEAD * self.costs.plain_s(position)

    def needs_plain(self, advantage: float) -> bool:
        """Whether a plain round is due, so that the cost that drafting is compared with is recent.

        It takes two: one straight after a drafted round is slower than those of plain decoding.
        advantage: tokens that each gives up.
        """
        return self._is_cold or self._since_plain * PROBE_SHARE >= 2.0 * advantage

    def pause(self, seconds: float, position: int) -> int:
        """Decodes plainly until a probe that costs so much is affordable.

        Returns the rounds until then.
        """
        plain_s = self.costs.plain_s(position)
        missing_s = self._lost_s + seconds - PROBE_SHARE * PROBE_AHEAD * plain_s
        n_rounds = missing_s / max(self._share * plain_s, 1e-12)
        self._n_paused = int(min(max(n_rounds, REFRESH), MOST_PAUSED))
        return self._n_paused

    def is_paused(self) -> bool:
        """Whether this round is one of them."""
        self._n_paused = max(self._n_paused - 1, 0)
        return self._n_paused > 0

    def pass_over(self, done: Round) -> None:
        """Counts a round towards the next probe; nothing else is learned from it."""
        self._lost_s -= self._share * done.seconds

    def observe(self, done: Round) -> None:
        """Learns from a round."""
        self._lost_s -= self._share * done.seconds
        self._is_cold = not done.n_positions and self._since_plain > 0 and self.costs.knows_plain
        self._since_plain = self._since_plain + 1 if done.n_positions else 0
        if done.n_positions and self.costs.knows_plain:
            self._lost_s += self._warm_s(done) - done.n_tokens * self.costs.plain_s(done.position)
        if not self._is_cold:
            self.costs.observe(done)
        least = PROBE_SHARE * PROBE_SAVED * self.costs.plain_s(done.position)
        self._lost_s = max(self._lost_s, -least if self.costs.knows_plain else 0.0)

    @property
    def _share(self) -> float:
        """Share of the running time that probes may cost now."""
        return PROBE_SHARE * min(max(self.hope / HOPEFUL, 1.0 / RAREST), 1.0)

    def _warm_s(self, done: Round) -> float:
        """Seconds of a round without what a first run costs extra.

        Building its graph may take as long as a hundred rounds, but only once: what it takes more
        than a probe may is no loss to be made up for.
        """
        if self.costs.is_warm(done) or not self.costs.knows_plain:
            return done.seconds
        plain_s = self.costs.plain_s(done.position)
        most_s = (done.n_tokens + PROBE_SHARE * PROBE_AHEAD) * plain_s
        return min(done.seconds, self.costs.round_s(done), most_s)


class BudgetedRule:
    """A budget's choices among what one answer allows."""

    is_narrow = False

    def __init__(
        self, budget: Budget, gains: Gains, lengths: list[int], sizes: list[int], least: int
    ) -> None:
        """Use `Budget.rule`."""
        self._budget, self._costs, self._gains = budget, budget.costs, gains
        self._lengths, self._sizes, self._least = lengths, np.array(sizes), least
        self._position, self._rate = 0, 0.0
        self._is_probe, self._again = False, 0
        self._n_old, self._more, self._knows = REFRESH, np.empty(0), np.empty(0, bool)
        self._kept, self._n_kept, self._advantage = 0, 0, 0.0
        self._n_chains = 0

    @property
    def n_rows(self) -> int:
        """Those of the largest size that it considers now."""
        return int(self._sizes[self._n_open() - 1]) + 1

    def choose(self, position: int, limit: int) -> int:
        """The most profitable length or 0; now and then a probe."""
        self._position, self._is_probe = position, False
        budget, costs = self._budget, self._costs
        if 0 < self._again <= limit:
            self._is_probe = True
            return self._again
        if not costs.knows_plain or budget.is_paused():
            return 0
        if self._n_kept and self._kept <= limit:
            self._n_kept -= 1
            return 0 if budget.needs_plain(self._advantage) else self._kept
        # A step of the ladder at a time: costs far beyond what was measured are guesses.
        n_open = sum(n <= costs.most_positions for n in self._lengths) + 1
        lengths = [n for n in self._lengths[:n_open] if self._least <= n <= limit]
        if not lengths:
            return 0
        plain_s = costs.plain_s(position)
        rate = max(self._rate, 1.0 / max(plain_s, 1e-9))
        first = self._lengths.index(lengths[0])
        draft_s = np.array([costs.draft_s(n) for n in lengths])
        outlook = _Outlook(
            self._gains.tables()[:, :, first : first + len(lengths)],
            self._more_s(),
            plain_s + draft_s,
            costs.sample_s,
        )
        for _ in range(N_RATE_STEPS):
            worth, rates = outlook.at(rate)
            rate = max(float(rates.max()), 1.0 / max(plain_s, 1e-9))
        self._rate = rate
        best = int(worth.argmax())
        advantage = float(worth[best]) - (1.0 - rate * plain_s)
        if advantage > 0.0:
            unknown = np.array([not costs.knows_draft(n) for n in lengths])
            best = self._try(worth, unknown)
            if self._gains.is_proven and not unknown[best]:
                self._kept, self._n_kept, self._advantage = lengths[best], REFRESH - 1, advantage
            return 0 if budget.needs_plain(advantage) else lengths[best]
        worth, _ = outlook.at(rate, must_verify=True)
        best = int(worth.argmax())
        loss_s = (1.0 - rate * plain_s - float(worth[best])) / rate
        if budget.may_lose(loss_s, position, may_save=True):
            self._is_probe = True
            return lengths[best]
        budget.pause(loss_s, position)
        return 0

    def pick(self, root: int, candidates: Candidates, limit: int) -> Tree:
        """The nodes that are worth their cost; a probe verifies one at least."""
        if self._n_chains and not self._is_probe:
            self._n_chains -= 1
            return self._pick_chain(root, candidates, limit)
        tree = grow(root, candidates, min(limit, self.n_rows - 1))
        values = self._values(self._gains.of(candidates, tree), slice(None))
        values[:, (self._sizes > limit) | (self._sizes < self._least)] = -np.inf
        values[0, self._sizes > len(candidates)] = -np.inf
        ends = np.minimum(self._sizes, tree.n_drafted)
        values[1, np.array(tree.depths)[ends] == ends] = -np.inf  # a chain, and costs as one
        best = float(values.max())
        if best == -np.inf or (best <= 0.0 and not self._is_probe):
            return chain(root, candidates, 0)
        kind, size = divmod(self._try(values.ravel(), ~self._knows.ravel()), len(self._sizes))
        n = int(self._sizes[size])
        if not kind and self._gains.is_proven and not self._is_probe:
            self._n_chains = REFRESH - 1
        return tree.first(n) if kind else chain(root, candidates, n)

    def _pick_chain(self, root: int, candidates: Candidates, limit: int) -> Tree:
        """The chain that is worth its cost most; none if none is."""
        values = self._values(self._gains.of_chain(candidates), 0)
        most = min(limit, len(candidates))
        values[(self._sizes > most) | (self._sizes < self._least)] = -np.inf
        at = int(values.argmax())
        return chain(root, candidates, int(self._sizes[at]) if values[at] > 0.0 else 0)

    def observe(self, done: Round) -> None:
        """Passes the round on. A first run says little of the next ones: it is repeated."""
        self._n_old = self._n_old + 1 if self._costs.is_warm(done) else REFRESH
        if done.n_drafted:
            self._gains.observe(done.n_expected, done.n_accepted)
            self._budget.hope = self._gains.first
        self._budget.observe(done)
        self._again = 0 if self._costs.knows_draft(done.n_positions) else done.n_positions

    def _try(self, values: Floats, is_unknown: NDArray[np.bool_]) -> int:
        """The best of some ways, or the best of those never measured if that costs little.

        values: tokens beyond what the seconds are worth.
        """
        best = int(values.argmax())
        if not self._gains.is_proven:
            return best
        news = np.where(is_unknown, values, -np.inf)
        way = int(news.argmax())
        loss_s = float(values[best] - news[way]) / self._rate
        return way if self._budget.may_lose(loss_s, self._position) else best

    def _values(self, gains: Floats, kind: int | slice) -> Floats:
        """What verifying is worth, [size] or [kind, size]."""
        return _values(gains, self._more_s()[kind, 0], self._rate, self._costs.sample_s)

    def _n_open(self) -> int:
        """Sizes of the ladder considered now: one step beyond the largest pass that was run."""
        known = int(np.searchsorted(self._sizes, self._costs.most_rows - 1, side="right"))
        return min(known + 1, len(self._sizes))

    def _more_s(self) -> Floats:
        """Seconds that verifying costs more than a plain pass, [kind, 1, size]; inf: not open.

        Also looks up which passes were run more than once, [kind, size].
        """
        if self._n_old < REFRESH:
            return self._more
        self._n_old = 0
        costs, position = self._costs, self._position
        rows_of = [int(n) + 1 for n in self._sizes]
        self._knows = np.array([[costs.knows_pass(n, t) for n in rows_of] for t in (False, True)])
        self._more = np.full((2, 1, len(self._sizes)), np.inf)
        plain_s = costs.pass_s(position, 1)
        for at in range(self._n_open()):
            rows = int(self._sizes[at]) + 1
            self._more[0, 0, at] = costs.pass_s(position, rows) - plain_s
            self._more[1, 0, at] = costs.pass_s(position, rows, True) - plain_s
        return self._more


class _Outlook:
    """What the last drafts would have given and cost at every length."""

    def __init__(self, gains: Floats, more_s: Floats, fixed_s: Floats, sample_s: float) -> None:
        """gains: [draft, kind, length, size]. more_s: [kind, 1, size], beyond a plain round.

        fixed_s: [length], the draft and a plain round. sample_s: choosing a token.
        """
        n_drafts, _, n_lengths, _ = gains.shape
        order = (0, 2, 1, 3)
        self._gains = gains.transpose(order).reshape(n_drafts, n_lengths, -1)
        self._more_s = more_s.transpose(1, 0, 2).reshape(-1)
        self._fixed_s, self._sample_s = fixed_s, sample_s

    def at(self, rate: float, *, must_verify: bool = False) -> tuple[Floats, Floats]:
        """Tokens beyond what the seconds are worth, and tokens a second, both [length].

        Each draft is verified in the way that is best at this rate, or not at all.
        """
        values = _values(self._gains, self._more_s, rate, self._sample_s)
        ways = values.argmax(axis=2)[:, :, None]
        best = np.take_along_axis(values, ways, 2)[:, :, 0]
        tokens = np.take_along_axis(self._gains, ways, 2)[:, :, 0]
        if not must_verify:
            tokens = np.where(best > 0.0, tokens, 0.0)
            best = np.maximum(best, 0.0)
        worth = 1.0 - rate * self._fixed_s + best.mean(axis=0)
        more_s = (tokens - best) / rate  # by what `values` are
        return worth, (1.0 + tokens.mean(axis=0)) / (self._fixed_s + more_s.mean(axis=0))


def _values(gains: Floats, more_s: Floats, rate: float, sample_s: float) -> Floats:
    """Tokens beyond the first that are left when the seconds beyond a plain round are paid for."""
    found: Floats = gains * (1.0 - rate * sample_s) - rate * more_s
    return found
