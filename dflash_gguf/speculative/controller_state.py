"""What was learned about drafting with one engine, and what drafting may still lose.

Losses are counted in plain rounds: the time of one with as many sequences as the round at hand has.
"""

from __future__ import annotations

import math

from .cost_model import CostModel, Round
from .promise import Promise, Trust
from .statistics import RunningMedian

SHARE = 0.01
"""Share of one answer's running time that drafts may lose, and as much again for copies. The sum is
the promise of "never slower": `auto` loses at most 2 % to plain decoding."""
DECIDING = 0.005
"""Share of the running time that deciding may take. With the copies' all choosing is within 2 %."""
AHEAD = 64
"""Plain rounds whose share may be lost before it is earned, and rounds in which a debt is paid."""
SAVED, OWED = 5.0, 16.0
"""Plain rounds that may be saved to be lost later, and that may be owed, however much is promised.
A long copy that fails costs up to ten. Copies that are right after 16 wrong ones are soon verified
again.
"""
SUSPENDED = 4.0
"""Times what a round is expected to take, beyond which the process or the machine stood still. That
is nobody's debt, as it would take a hundred times as long to earn, and earns nobody anything."""
TRUSTED = 8.0
"""Accepted candidates that trust in copies begins with: so many missing ones halve it. Two long
copies that fail at a process's beginning shall not keep all others from being verified."""
MEMORY = 16
"""Rounds that count as lately: after so many one weighs 1/e in the rate."""
N_HOPELESS = 8
"""Drafts in a row of which nothing was accepted, after which drafts earn a quarter of their share.
"""
MAX_PAUSE = 24
"""Plain rounds in which nobody is asked at most: a copy begins so much later."""
N_MISSES = 4
"""Texts asked about in vain, after which one rests until asking took a hundredth of the time.
Sooner one rests less, as a copy goes on a few tokens after a change. Played on recorded answers,
beside a whole rest at once: single answers are 0 to 6 % faster where they are edits, 0 to 2 % else;
2 to 16 at once 0.4 % on average over all kinds (from -4 to 8 %)."""
MAX_TTL_ROUNDS = 256
"""Rounds after which a decision is made anew at the latest."""


def share(n_sequences: int) -> float:
    """Of the time of so many answers, what may be lost: a look tells more of many."""
    return SHARE / math.sqrt(n_sequences)


class Account:
    """What some kind of drafting has lost beyond plain decoding, in plain rounds."""

    def __init__(self) -> None:
        self._lost = 0.0

    def may_lose(self, rounds: float) -> bool:
        """Whether so much more may be lost now."""
        return self._lost + rounds <= SHARE * AHEAD

    def is_repaid_by(self, gain: float) -> bool:
        """Whether AHEAD rounds that gain so much each would make up for what was lost."""
        return self.lacks(-gain) == 0.0

    def lacks(self, loss: float) -> float:
        """How much is to be earned before so much may be lost, or before a gain repays the rest."""
        loss = loss if loss >= 0.0 else -min(AHEAD * -loss, OWED)
        return max(self._lost + loss - SHARE * AHEAD, 0.0)

    def book(self, rounds: float) -> None:
        """A round has lost so much. Less than 0: gained, or earned as time went by."""
        self._lost = max(self._lost + rounds, -SAVED)


class Rate:
    """Tokens a second of the last rounds, all of as many sequences."""

    def __init__(self) -> None:
        self._n_sequences, self._tokens, self._seconds = 0, 0.0, 0.0

    def of(self, n_sequences: int) -> float:
        """0 before any such rounds, and where the last were of another number."""
        is_known = self._seconds > 0.0 and n_sequences == self._n_sequences
        return self._tokens / self._seconds if is_known else 0.0

    def observe(self, done: Round, seconds: float, plain_s: float) -> None:
        """plain_s: of a plain round; 0: not known."""
        if done.n_sequences != self._n_sequences:  # many at once are faster by far than one
            n_before = MEMORY * (plain_s > 0.0)  # as if plain: one good round is not the rate
            self._tokens, self._seconds = float(n_before * done.n_sequences), n_before * plain_s
            self._n_sequences = done.n_sequences
        keep = (1.0 - 1.0 / MEMORY) ** done.n_rounds
        self._tokens = keep * self._tokens + done.n_tokens
        self._seconds = keep * self._seconds + seconds


class Known:
    """What was learned about drafting with one engine on one machine. It outlives answers.

    costs: what rounds take. promise: what a draft promises, and how far that came true. copied: how
    far the chances of copies did. asking: seconds that it takes to ask for copies where there are
    none. rate: of the last rounds. paid, free: the accounts of drafts that cost a pass, and of
    those that cost none: what copies win is not for the drafter to lose.
    """

    def __init__(self, costs: CostModel | None = None) -> None:
        """costs: what was measured before, if anything was."""
        self.costs = costs or CostModel()
        self.promise = Promise()
        self.copied = Trust(TRUSTED, 2 * MEMORY)
        self.asking = RunningMedian()
        self.rate = Rate()
        self.paid, self.free = Account(), Account()
        self._choose_s = 0.0  # of a decision, on average
        self._n_hopeless = 0  # drafts in a row of which nothing was accepted
        self._since_draft = self._since_plain = self._since_filed = 0  # rounds
        self._was_plain = True

    @property
    def ttl_rounds(self) -> int:
        """Rounds that a decision is kept for, so that making it is a small part of them."""
        plain_s = self.costs.plain_s(0) if self.costs.knows_plain else 0.0
        return math.ceil(
            min(max(self._choose_s / max(DECIDING * plain_s, 1e-9), 1.0), MAX_TTL_ROUNDS)
        )

    def rounds_until_affordable(self, loss: float, n_sequences: int) -> int:
        """Rounds until drafts may lose so much, or gain it if it is less than 0."""
        rounds = self.paid.lacks(loss) / self._paid_share(n_sequences)
        return math.ceil(min(rounds, MAX_TTL_ROUNDS))

    def _paid_share(self, n_sequences: int) -> float:
        """Of the time, what drafts may lose."""
        return share(n_sequences) if self._n_hopeless < N_HOPELESS else share(n_sequences) / 4.0

    def needs_plain(self, gain: float) -> bool:
        """Whether a plain round is due, so that what drafting is compared with is recent.

        gain: plain rounds that are given up for it. It takes two, as one straight after a drafted
        round is slower than those of plain decoding.
        """
        return self._since_plain * SHARE >= 2.0 * gain

    def observe(self, done: Round) -> None:
        """Learns from a round, or from plain ones in a row."""
        costs, n = self.costs, done.n_sequences
        plain_s = 0.0
        if costs.knows_plain_of(n):
            plain_s = max(costs.plain_s(done.position, n), 1e-9)
        if done.choose_s > 0.0:
            weight = 1.0 / min(4.0, 1.0 + costs.n_observed)
            self._choose_s += weight * (done.choose_s - self._choose_s)
        self._compare(done)
        if plain_s > 0.0:
            if done.is_timing_shared:
                done = costs.expected(done)
            seconds = self._usual_s(done, plain_s)
            self._book(done, seconds, plain_s)
            self.rate.observe(done, seconds, plain_s)
        elif not done.is_timing_shared:
            self.rate.observe(done, done.seconds, 0.0)
        # What drafting needed has left the target's weights and state out of the CPU's caches.
        is_cold = done.is_plain and done.n_rounds == 1 and not self._was_plain and plain_s > 0.0
        if not (is_cold or done.is_timing_shared):
            self._file(done)
        self._since_plain = 0 if done.is_plain and not is_cold else self._since_plain + 1
        self._since_draft = 0 if done.n_positions else self._since_draft + done.n_rounds
        self._was_plain = done.is_plain

    def _compare(self, done: Round) -> None:
        """What was accepted, with what was expected to be."""
        if done.n_expected > 0.0 and not done.has_both_kinds:
            if not done.n_positions:
                self.copied.observe(done.n_expected, done.n_accepted)
            elif done.n_drafted:
                self.promise.trust.observe(done.n_expected, done.n_accepted)
        if done.n_drafted and done.n_positions:
            self._n_hopeless = 0 if done.n_accepted else self._n_hopeless + 1

    def _usual_s(self, done: Round, plain_s: float) -> float:
        """Seconds of a round without what others like it will not take.

        Until something was accepted there may be no others: then the first one counts as it is.
        """
        is_settled = self.promise.is_proven or not done.n_positions
        if is_settled and not self.costs.is_warm(done):
            return min(done.seconds, self.costs.expected(done).seconds)
        if done.seconds > SUSPENDED * plain_s * done.n_rounds:
            return min(done.seconds, SUSPENDED * self.costs.expected(done).seconds)
        return done.seconds

    def _book(self, done: Round, seconds: float, plain_s: float) -> None:
        """What time has earned, and what a drafted round has lost beyond plain decoding."""
        n, rounds = done.n_sequences, seconds / plain_s
        self.paid.book(-rounds * self._paid_share(n))
        self.free.book(-rounds * share(n))
        if done.has_both_kinds:  # what others proposed as well would have come without the draft
            n_won = done.n_accepted - done.n_lookup_accepted
            self.paid.book(min(done.draft_s, seconds) / plain_s - n_won / n)
        elif not done.is_plain:
            account = self.paid if done.n_positions else self.free
            account.book(rounds - done.n_tokens / n)

    def _file(self, done: Round) -> None:
        """Filing a round takes a while too; of those that are well known some are enough."""
        self._since_filed += done.n_rounds
        if self._since_filed >= MEMORY or not self.costs.is_settled(done):
            self._since_filed = 0
            # After a pause a draft also takes up all rows that were decoded meanwhile.
            is_usual = self._since_draft < MEMORY or not self.costs.most_draft_rows(done.is_top1)
            self.costs.observe(done, with_draft=is_usual)


class ProposalBackoff:
    """How long nobody is asked for copies, as asking takes a while too: less often if in vain.

    That is also where they bring less than asking for them takes, as beside many others.
    """

    def __init__(self, known: Known) -> None:
        self._known = known
        self._paying: Round | None = None  # the last round in which asking was worth it
        self._n_asked = 1  # texts of the last round
        self._n_misses = 0  # texts that were asked about since

    def start(self) -> None:
        """One text becomes another, in which there may be more to copy."""
        self._n_misses -= self._n_misses // self._n_asked

    def pays(self, done: Round, saved_s: float) -> None:
        """There are copies that save so much time: be it later, where a plain round is due."""
        if saved_s > self._known.asking.value:
            self._paying = done

    def pause(self, done: Round, host_s: float) -> int:
        """Rounds without asking after this one, in which it took host_s; 0: not known."""
        known, self._n_asked = self._known, max(done.n_asked, 1)
        if host_s > 0.0:
            known.asking.add(host_s)
        if self._paying is done:
            self._n_misses = 0
            return 0
        n_sequences = done.n_sequences
        least_s = share(n_sequences) * known.costs.plain_s(done.position, n_sequences)
        n = known.asking.value / max(least_s, 1e-9) * self._n_misses / N_MISSES
        self._n_misses = min(self._n_misses + done.n_asked, N_MISSES * MAX_PAUSE)
        return int(min(n, MAX_PAUSE))
