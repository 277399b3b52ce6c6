"""draft="auto" where a plain round takes less time than the budget's decision.

Greedy chains only, of the drafter's best candidates as they are: what is expected of a length is
how often the target took so many lately, not what this draft promises. A decision is kept for some
rounds. Costs of passes and what probes may cost are the budget's.
"""

from __future__ import annotations

import math
from collections import Counter

from ..draft.tree import Candidates, Tree, chain
from .budget import SIZES, Budget, BudgetedRule
from .costs import Costs, Median, Round, between
from .gains import ladder
from .rules import Rule

BRIEF_S = 1e-3
"""Plain rounds that take less are brief: the budget would take a quarter of a millisecond more for
a drafted one."""
MEMORY = 64
"""Rounds after which an outcome weighs 1/e."""
PRIOR_CHANCE, PRIOR_WEIGHT = 0.7, 2.0
"""Of a candidate being taken, and the outcomes it counts as."""
KEPT = 16
"""Rounds between decisions."""
DOUBTED, NEARLY = 8, 0.75
"""Decisions after which a neighbour of the best length is measured anew, if it was nearly as good:
the first rounds of a length build graphs for every count of accepted tokens, and seem too slow."""
FILED, ALL_FILED = 4, 8
"""One in so many rounds is filed once so many of its length were: filing takes a tenth of such a
round."""
SURE = 32
"""Rounds after which it is decided again whether rounds are brief."""
FIRST = 3
"""The longest chain that is tried first."""
PROBES = 1
"""Rounds of a probe after first runs, which are slower than later ones. A probe goes on as long as
more is accepted than was expected."""


class Taken:
    """How often the target took a chain's candidates, and what narrow drafts cost."""

    def __init__(self, longest: int, n_first: int = 1) -> None:
        """longest: positions of a draft. n_first: runs that are slower than those to come."""
        self.n_probes = n_first + PROBES
        self._n_first = n_first
        self._tried = [PRIOR_WEIGHT] * longest
        self._taken = [PRIOR_WEIGHT * PRIOR_CHANCE] * longest
        self._drafts: dict[int, Median] = {}
        self._n_filed: Counter[int] = Counter()

    def is_filed(self, length: int) -> bool:
        """Whether enough drafts of this length were filed; length 0 stands for plain rounds."""
        return self._n_filed[length] >= ALL_FILED

    def file(self, done: Round) -> None:
        """Remembers what a narrow draft took."""
        self._n_filed[done.n_positions] += 1
        if not done.n_positions:
            return
        self._drafts.setdefault(done.n_positions, Median(self._n_first)).add(done.draft_s)

    def observe(self, done: Round) -> None:
        """Learns from a round with a chain."""
        keep = 1.0 - 1.0 / MEMORY
        for place in range(min(done.n_drafted, done.n_accepted + 1)):
            is_taken = place < done.n_accepted
            prior = (1.0 - keep) * PRIOR_WEIGHT
            self._tried[place] = keep * self._tried[place] + prior + 1.0
            self._taken[place] = keep * self._taken[place] + prior * PRIOR_CHANCE + is_taken

    def tokens(self, longest: int) -> list[float]:
        """Tokens expected of rounds with chains of 0 to `longest`."""
        path, found = 1.0, [1.0]
        for taken, tried in zip(self._taken[:longest], self._tried, strict=False):
            path *= taken / tried
            found.append(found[-1] + path)
        return found

    @property
    def longest_known(self) -> int:
        """The longest draft that was run more than once, 0 if none was."""
        return max((n for n, median in self._drafts.items() if median.is_warm), default=0)

    def draft_s(self, length: int) -> float:
        """A draft of this length; 0 while nothing is known."""
        points = ((n, median.value, median.is_warm) for n, median in self._drafts.items())
        return between(sorted(points), length)


class BriefRule:
    """Chains of one length for some rounds, whichever length has the most tokens a second."""

    is_narrow = True

    def __init__(self, budget: Budget, taken: Taken, longest: int, least: int) -> None:
        """longest, least: candidates of a chain."""
        self._budget, self._costs, self._taken = budget, budget.costs, taken
        self._lengths = [n for n in ladder(SIZES, longest) if n >= least]
        self._kept, self._n_kept = 0, 0
        self._n_decisions, self._n_seen = 0, 0
        self._expected = math.inf  # tokens of a round of a probe

    @property
    def n_rows(self) -> int:
        """Those of its longest chain and the last token."""
        return self._lengths[-1] + 1

    def choose(self, position: int, limit: int) -> int:
        """The length decided on lately, or the best now."""
        if self._n_kept and self._kept <= limit:
            self._n_kept -= 1
            return self._kept
        lengths = [n for n in self._lengths if n <= min(limit, self._longest_open())]
        if not lengths:
            return 0
        self._expected = math.inf
        costs, plain_s = self._costs, self._costs.plain_s(position)
        tokens = self._taken.tokens(lengths[-1])
        seconds = [
            self._taken.draft_s(n) + costs.pass_s(position, n + 1) + tokens[n] * costs.sample_s
            for n in lengths
        ]
        rates = [tokens[n] / s for n, s in zip(lengths, seconds, strict=True)]
        at = max(range(len(rates)), key=rates.__getitem__)
        loss_s = seconds[at] - tokens[lengths[at]] * plain_s
        if loss_s < 0.0:
            if self._budget.needs_plain(-loss_s / plain_s):
                return 0
            return self._keep(lengths[self._doubted(rates, at)], KEPT)
        if self._budget.may_lose(self._taken.n_probes * loss_s, position, may_save=True):
            self._expected = tokens[lengths[at]]
            return self._keep(lengths[at], self._taken.n_probes)
        return self._keep(0, self._budget.pause(self._taken.n_probes * loss_s, position))

    def _keep(self, length: int, n_rounds: int) -> int:
        self._kept, self._n_kept = length, n_rounds - 1
        return length

    def _doubted(self, rates: list[float], best: int) -> int:
        """The place of the best length, now and then that of a neighbour."""
        self._n_decisions += 1
        turn, is_due = divmod(self._n_decisions, DOUBTED)[0], self._n_decisions % DOUBTED == 0
        other = best + (1 if turn % 2 else -1)
        if is_due and 0 <= other < len(rates) and rates[other] >= NEARLY * rates[best]:
            return other
        return best

    def _longest_open(self) -> int:
        """A step of the ladder beyond what was measured; a short one before anything was."""
        known = self._taken.longest_known
        return next((n for n in self._lengths if n > known), known) if known else FIRST

    def pick(self, root: int, candidates: Candidates, limit: int) -> Tree:
        """The best candidate of every position."""
        return chain(root, candidates, limit)

    def observe(self, done: Round) -> None:
        """Learns what was taken, and of some rounds what they cost."""
        if done.n_drafted:
            self._taken.observe(done)
            self._budget.hope = self._taken.tokens(1)[1] - 1.0
            if done.n_accepted >= self._expected:
                self._n_kept = max(self._n_kept, self._taken.n_probes)
        self._n_seen += 1
        if self._n_seen % FILED and self._taken.is_filed(done.n_positions):
            self._budget.pass_over(done)
            return
        self._taken.file(done)
        self._budget.observe(done)


class AutoRule:
    """The brief rule where plain rounds are brief, else the budget's."""

    def __init__(self, costs: Costs, budgeted: BudgetedRule, brief: BriefRule) -> None:
        """Both learn into one budget, whose costs these are."""
        self._costs, self._budgeted, self._brief = costs, budgeted, brief
        self._now: Rule = budgeted
        self._n_sure = 0

    @property
    def is_narrow(self) -> bool:
        """That of the rule that chose last."""
        return self._now.is_narrow

    @property
    def n_rows(self) -> int:
        """The most that either would run now."""
        return max(self._budgeted.n_rows, self._brief.n_rows)

    def choose(self, position: int, limit: int) -> int:
        """As the rule that applies now."""
        if self._n_sure:
            self._n_sure -= 1
        elif self._costs.knows_plain:
            is_brief = self._costs.plain_s(position) < BRIEF_S
            self._now = self._brief if is_brief else self._budgeted
            self._n_sure = SURE - 1
        return self._now.choose(position, limit)

    def pick(self, root: int, candidates: Candidates, limit: int) -> Tree:
        """As the rule that chose."""
        return self._now.pick(root, candidates, limit)

    def observe(self, done: Round) -> None:
        """Passes the round on to the rule that chose."""
        self._now.observe(done)
